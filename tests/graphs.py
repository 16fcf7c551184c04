"""What is in the graph of a function."""

import collections

import tensorflow as tf


def used_operations(function, *arguments):
    """How often each operation is in the graph, and is used."""
    step = tf.function(function, autograph=False)
    step = step.get_concrete_function(*arguments)
    # TensorFlow traces more than is used, and drops it before it runs.
    graph = tf.compat.v1.graph_util.extract_sub_graph(
        step.graph.as_graph_def(), [t.op.name for t in step.outputs]
    )
    return collections.Counter(node.op for node in graph.node)


def count_products(operations):
    """How many of them are matrix products."""
    return sum(n for name, n in operations.items() if "MatMul" in name)
