"""What is in the graph of a function."""

import collections

import tensorflow as tf


def used_operations(function, *arguments):
    """How often each operation is in the graph, and is used.

    What is in a function counts as often as the function is called.
    """
    step = tf.function(function, autograph=False)
    step = step.get_concrete_function(*arguments)
    graph = step.graph.as_graph_def()
    functions = {f.signature.name: f for f in graph.library.function}

    def count(nodes, needed):
        # TensorFlow traces more than is used, and drops it before it runs.
        found, nodes = collections.Counter(), {n.name: n for n in nodes}
        needed, seen = [_producer(name) for name in needed], set()
        while needed:
            name = needed.pop()
            if name in seen or name not in nodes:
                continue
            seen.add(name)
            node = nodes[name]
            needed += map(_producer, node.input)
            if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
                called = functions[node.attr["f"].func.name]
                returned = [*called.ret.values(), *called.control_ret.values()]
                found += count(called.node_def, returned)
            else:
                found[node.op] += 1
        return found

    return count(graph.node, [t.op.name for t in step.outputs])


def _producer(tensor):
    """The name of the operation that a tensor comes from."""
    return tensor.removeprefix("^").split(":")[0]


def count_products(operations):
    """How many of them are matrix products."""
    return sum(n for name, n in operations.items() if "MatMul" in name)
