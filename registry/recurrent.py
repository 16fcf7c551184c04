"""Rules for SimpleRNN, LSTM and GRU: ζ is x·W + b of all steps at once.

At step t a cell computes ζₜ + hₜ₋₁·U and passes the sum through its gates. The
derivative of the loss by ζₜ is that by the sum, so the one cotangent g serves
both kernels: the gradient of W is Σₜ xₜᵀgₜ and that of U is Σₜ hₜ₋₁ᵀgₜ. Both
are `Linear` terms over all steps, and the loop holds no weight gradients.

A GRU that resets after the product multiplies its candidate's h·U + b by the
reset gate r, so there g is multiplied by r as well. One that resets before the
product has a = r·h in its candidate.

`Bidirectional` calls two such layers. Other cells are left to the fallback.
"""

import functools

import keras
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry.dense import bias
from keras_fastclip.registry.linear import Later, Stacked, join_blocks
from keras_fastclip.registry.lookup import register
from keras_fastclip.registry.terms import Small, itself

_LAYERS = (
    keras.layers.RNN,
    keras.layers.SimpleRNN,
    keras.layers.LSTM,
    keras.layers.GRU,
)


@register(keras.layers.RNN)
@register(keras.layers.SimpleRNN)
@register(keras.layers.LSTM)
@register(keras.layers.GRU)
def recurrent(layer, sequences, initial_state=None, mask=None, training=False):
    mask = next((m for m in keras.tree.flatten(mask) if m is not None), None)
    kind = _kind_of(layer, mask)
    if kind is None:
        return NotImplemented
    if initial_state is None:
        initial_state = layer.get_initial_state(tf.shape(sequences)[0])
    states = [
        keras.ops.convert_to_tensor(state, dtype=layer.cell.compute_dtype)
        for state in keras.tree.flatten(initial_state)
    ]
    cell = kind(layer.cell, sequences[:, 0], states[0], training)
    loop = _Loop(cell, layer, mask)
    terms = cell.terms(sequences, loop)
    return cell.project(sequences), terms, lambda zeta: loop.run(zeta, states)


def _kind_of(layer, mask):
    """How to run the layer's cell; None for what is left to the fallback."""
    cell = layer.cell
    known = any(type(layer).inner_loop is c.inner_loop for c in _LAYERS)
    if not known or layer.stateful:
        return None
    zeroed = mask is not None and layer.zero_output_for_mask
    if zeroed and layer.unroll and layer.go_backwards:
        return None  # Keras zeroes the outputs of other steps then.
    for base, kind in _KINDS.items():
        if isinstance(cell, base):
            same = type(cell).call is base.call and "call" not in vars(cell)
            dropped = max(cell.dropout, cell.recurrent_dropout)
            return kind if same and dropped < 1 else None
    return None


class _Cell:
    """A cell in two parts: a product with the state, and the gates.

    `inner` is hₜ₋₁·U, and `step` maps ζₜ, this product and the states to the
    new states.

    Args:
        cell: the Keras cell.
        first: the input of the first step, for the shape of dropout masks.
        state: the initial state, likewise.
        training: whether dropout applies.
    """

    gates = 1
    shown = 0  # How many of what `step` saves the terms ask for.

    def __init__(self, cell, first, state, training):
        self.cell = cell
        # Drawn in this order by Keras, and also where they are not applied.
        # There is one mask for all gates, or a list with one for each.
        masks = cell.get_dropout_mask(first)
        recurrent_masks = cell.get_recurrent_dropout_mask(state)
        cell.reset_dropout_mask()
        cell.reset_recurrent_dropout_mask()
        self.masks = masks if training else None
        self.recurrent_masks = recurrent_masks if training else None
        with _keras.autocast(cell):
            self.kernel = tf.convert_to_tensor(cell.kernel)
            self.offset, self.weights = self._read_weights()

    def _read_weights(self):
        """The bias within ζ, and the weights that the loop reads."""
        kernel = tf.convert_to_tensor(self.cell.recurrent_kernel)
        if not self.cell.use_bias:
            return None, [kernel]
        return tf.convert_to_tensor(self.cell.bias), [kernel]

    def project(self, sequences):
        """ζ of all steps."""
        # Swapped before the product, where there are fewer numbers to move.
        # The loop swaps ζ back, so that TensorFlow moves none.
        x, masks = _swapped(sequences), self.masks
        if isinstance(masks, list):
            kernels = tf.split(self.kernel, self.gates, -1)
            parts = zip(masks, kernels, strict=True)
            zeta = tf.concat([_times(x * m, k) for m, k in parts], -1)
        else:
            zeta = _times(x if masks is None else x * masks, self.kernel)
        return _swapped(zeta if self.offset is None else zeta + self.offset)

    def terms(self, sequences, loop):
        """How all weights act on ζ and on what follows it."""
        cell, length = self.cell, sequences.shape[1]
        x = _dropped(sequences, self.masks)
        terms = self._bias_terms(loop)
        kernels = [cell.kernel, cell.recurrent_kernel]
        if self._can_stack() and all(k.trainable for k in kernels):
            stacked = Stacked(
                kernels,
                lambda: tf.concat([x, self.hidden(loop)], -1),
                itself,
                positions=length,
            )
            return [stacked, *terms]

        def term(kernel, a, by_gate, canonical):
            if not by_gate:
                return Later(kernel, a, canonical, positions=length)
            return Later(
                kernel,
                a,
                lambda g: tf.stack(tf.split(canonical(g), self.gates, -1), 2),
                functools.partial(join_blocks, shape=tuple(kernel.shape)),
                positions=length,
                blocks=self.gates,
            )

        return [
            term(cell.kernel, lambda: x, isinstance(self.masks, list), itself),
            term(
                cell.recurrent_kernel,
                lambda: self.hidden(loop),
                self._by_gate(),
                lambda g: self.cotangent_of_inner(g, loop),
            ),
            *terms,
        ]

    def _can_stack(self):
        """Whether both kernels have one input and meet one cotangent."""
        return not isinstance(self.masks, list) and not self._by_gate()

    def _by_gate(self):
        """Whether U is applied to another input in each gate."""
        return isinstance(self.recurrent_masks, list)

    def _bias_terms(self, loop):
        return [bias(self.cell.bias)] if self.cell.use_bias else []

    def hidden(self, loop):
        """What U is applied to, (B, T, u), or (B, T, gates, u)."""
        return _dropped(loop.previous(), self.recurrent_masks)

    def cotangent_of_inner(self, g, loop):
        """The cotangent of hₜ₋₁·U of all steps, from that of ζ."""
        return g

    def inner(self, h, weights):
        masks, kernel = self.recurrent_masks, weights[0]
        if not isinstance(masks, list):
            return tf.matmul(h if masks is None else h * masks, kernel)
        parts = zip(masks, tf.split(kernel, self.gates, -1), strict=True)
        return tf.concat([tf.matmul(h * m, k) for m, k in parts], -1)

    def pull_inner(self, cotangent, transposed):
        """The cotangent of h from that of `inner`, with Uᵀ."""
        masks = self.recurrent_masks
        if not isinstance(masks, list):
            product = tf.matmul(cotangent, transposed)
            return product if masks is None else product * masks
        parts = zip(
            tf.split(cotangent, self.gates, -1),
            tf.split(transposed, self.gates, 0),
            masks,
            strict=True,
        )
        return tf.add_n([tf.matmul(part, k) * m for part, k, m in parts])

    def step(self, zeta, inner, states, weights):
        """The new states, and what `pull` needs to know of the step."""
        raise NotImplementedError

    def slopes(self):
        """The derivatives of the activations by their results, if known."""
        used = [self.cell.activation, self.cell.recurrent_activation]
        slopes = [_SLOPES.get(activation) for activation in used]
        return None if None in slopes else slopes

    def pull(self, saved, cotangents):
        """The backward pass of `step`.

        Args:
            saved: what `step` returned beside the states.
            cotangents: of the new states.

        Returns:
            The cotangents of ζ, of the inner product and of the old states,
            None where that is zero but for what the product adds.
        """
        raise NotImplementedError


class _Simple(_Cell):
    def step(self, zeta, inner, states, weights):
        h = self.cell.activation(zeta + inner)
        return [h], [h]

    def slopes(self):
        slope = _SLOPES.get(self.cell.activation)
        return None if slope is None else [slope]

    def pull(self, saved, cotangents):
        (slope,) = self.slopes()
        d_zeta = slope(*saved, *cotangents)
        return d_zeta, d_zeta, [None]


class _LSTM(_Cell):
    gates = 4

    def step(self, zeta, inner, states, weights):
        gate, activation = self.cell.recurrent_activation, self.cell.activation
        i, f, new, o = tf.split(zeta + inner, 4, -1)
        i, f, new, o = gate(i), gate(f), activation(new), gate(o)
        carry = f * states[1] + i * new
        out = activation(carry)
        return [o * out, carry], [i, f, new, o, out, states[1]]

    def pull(self, saved, cotangents):
        slope, gate_slope = self.slopes()
        (i, f, new, o, out, before), (d_h, d_carry) = saved, cotangents
        d_carry += slope(out, d_h * o)
        d_zeta = tf.concat(
            [
                gate_slope(i, d_carry * new),
                gate_slope(f, d_carry * before),
                slope(new, d_carry * i),
                gate_slope(o, d_h * out),
            ],
            -1,
        )
        return d_zeta, d_zeta, [None, d_carry * f]


class _GRU(_Cell):
    """z and r are the update and the reset gate."""

    gates = 3
    shown = 1  # r

    @property
    def _after(self):
        return self.cell.reset_after

    def _read_weights(self):
        offset, weights = super()._read_weights()
        if self._after and offset is not None:
            return offset[0], [*weights, offset[1]]
        return offset, weights

    def _can_stack(self):
        return False

    def _by_gate(self):
        return not self._after or super()._by_gate()

    def _bias_terms(self, loop):
        if not self._after or not self.cell.use_bias:
            return super()._bias_terms(loop)

        def rows_of_bias(g):
            inner = self.cotangent_of_inner(g, loop)
            return tf.stack([tf.reduce_sum(g, 1), tf.reduce_sum(inner, 1)], 1)

        return [Small(self.cell.bias, rows_of_bias)]

    def hidden(self, loop):
        h = super().hidden(loop)
        if self._after:
            return h
        inputs = [h] * 3 if h.shape.rank == 3 else tf.unstack(h, axis=2)
        return tf.stack([*inputs[:2], inputs[2] * loop.shown(0)], 2)

    def cotangent_of_inner(self, g, loop):
        if not self._after:
            return g
        # g is zero in rows that are left out, where r may be anything.
        r = tf.cast(loop.shown(0), g.dtype)
        g_z, g_r, g_new = tf.split(g, 3, -1)
        return tf.concat([g_z, g_r, tf.math.multiply_no_nan(r, g_new)], -1)

    def inner(self, h, weights):
        if self._after:
            product = super().inner(h, weights)
            return product + weights[1] if len(weights) > 1 else product
        # The candidate's product waits for the reset gate.
        masks = self.recurrent_masks or [1, 1]
        parts = zip(masks, tf.split(weights[0], 3, -1)[:2], strict=False)
        return tf.concat([tf.matmul(h * m, k) for m, k in parts], -1)

    def step(self, zeta, inner, states, weights):
        gate, (h,) = self.cell.recurrent_activation, states
        x_z, x_r, x_new = tf.split(zeta, 3, -1)
        h_z, h_r, *rest = tf.split(inner, 3 if self._after else 2, -1)
        z, r = gate(x_z + h_z), gate(x_r + h_r)
        if self._after:
            (product,) = rest
            candidate = x_new + r * product
        else:
            product = None
            masks = self.recurrent_masks
            kept = r * (h if masks is None else h * masks[2])
            kernel = tf.split(weights[0], 3, -1)[2]
            candidate = x_new + tf.matmul(kept, kernel)
        new = self.cell.activation(candidate)
        return [z * h + (1 - z) * new], [r, z, new, product, h]

    def slopes(self):
        return super().slopes() if self._after else None

    def pull(self, saved, cotangents):
        slope, gate_slope = self.slopes()
        (r, z, new, product, h), (d_h,) = saved, cotangents
        d_z = gate_slope(z, d_h * (h - new))
        d_new = slope(new, d_h * (1 - z))
        d_r = gate_slope(r, d_new * product)
        d_zeta = tf.concat([d_z, d_r, d_new], -1)
        d_inner = tf.concat([d_z, d_r, d_new * r], -1)
        return d_zeta, d_inner, [d_h * z]


_KINDS = {
    keras.layers.SimpleRNNCell: _Simple,
    keras.layers.LSTMCell: _LSTM,
    keras.layers.GRUCell: _GRU,
}

# By activation, the product of its derivative with dy, from its result y.
_SLOPES = {
    keras.activations.tanh: lambda y, dy: tf.raw_ops.TanhGrad(y=y, dy=dy),
    keras.activations.sigmoid: lambda y, dy: tf.raw_ops.SigmoidGrad(y=y, dy=dy),
    keras.activations.relu: lambda y, dy: tf.raw_ops.ReluGrad(
        gradients=dy, features=y
    ),
    keras.activations.linear: lambda y, dy: dy,
}


# A turn of a loop costs as much as a small product, whatever is done in it.
_STEPS_IN_A_TURN = 10


class _Loop:
    """The steps of a layer, from ζ to what the layer returns.

    What the terms of the recurrent weights need to know of it is kept.
    """

    def __init__(self, cell, layer, mask):
        self._cell, self._layer = cell, layer
        self._mask = None if mask is None else self._in_order(_column(mask))
        self._hidden = self._shown = None

    def _in_order(self, tensor):
        """(B, T, ·) in the order of the layer's steps, and back."""
        return tf.reverse(tensor, [1]) if self._layer.go_backwards else tensor

    def previous(self):
        """hₜ₋₁ for each position of the sequence, (B, T, u)."""
        return self._in_order(_swapped(self._hidden[:-1]))

    def shown(self, index):
        """What the cell saved at each position of the sequence, (B, T, u)."""
        return self._in_order(_swapped(self._shown[index]))

    def run(self, zeta, states):
        layer, mask = self._layer, self._mask
        loop = _while
        if tf.executing_eagerly() or layer.unroll:
            loop = _unrolled
        elif self._cell.slopes():
            loop = _while_with_gradient
        hidden, last, shown = loop(
            self._cell, self._in_order(zeta), states, mask
        )
        self._hidden, self._shown = hidden, shown
        outputs = hidden[1:] if layer.return_sequences else hidden
        if mask is not None:
            outputs = _masked(hidden[1:], mask, layer.zero_output_for_mask)
        output = _swapped(outputs) if layer.return_sequences else outputs[-1]
        output = keras.ops.cast(output, layer.compute_dtype)
        if not layer.return_state:
            return output
        return output, *(keras.ops.cast(s, layer.compute_dtype) for s in last)


def _unrolled(cell, zeta, states, mask):
    """h at first and after each step, (T + 1, B, u), and the last states.

    And of all steps what the cell shows of them.
    """
    hidden, shown = [states[0]], []
    masks = [None] * zeta.shape[1]
    if mask is not None:
        masks = tf.unstack(mask, axis=1)
    for zeta_t, mask_t in zip(tf.unstack(zeta, axis=1), masks, strict=True):
        inner = cell.inner(states[0], cell.weights)
        new, saved = cell.step(zeta_t, inner, states, cell.weights)
        states = _where(mask_t, new, states)
        hidden.append(states[0])
        shown.append(saved[: cell.shown])
    return (
        tf.stack(hidden),
        states,
        [tf.stack(s) for s in zip(*shown, strict=True)],
    )


def _while(cell, zeta, states, mask):
    """As above, in a loop that TensorFlow differentiates."""
    hidden, last, saved = _forward(
        cell, zeta, states, cell.weights, mask, cell.shown
    )
    return hidden, last, _stacked(saved)


def _while_with_gradient(cell, zeta, states, mask):
    """As above, with a backward pass that holds no weight gradients.

    They are left to one product after the loop, which is not even computed
    where the weights are not differentiated.
    """

    @_keras.custom_gradient
    def run(zeta, *arguments):
        initial, weights = arguments[: len(states)], arguments[len(states) :]
        hidden, last, saved = _forward(cell, zeta, initial, weights, mask)
        shown = _stacked([arrays[: cell.shown] for arrays in saved])

        def backward(d_hidden, *d_rest):
            d_last = d_rest[: len(last)]  # No loss depends on what is shown.
            d_zeta, d_inner, d_initial = _backward(
                cell, zeta, weights, mask, saved, d_hidden, d_last
            )
            d_initial[0] += d_hidden[0]
            previous = hidden[:-1]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights)
                inner = cell.inner(previous, weights)
            d_weights = tape.gradient(inner, weights, d_inner)
            return _swapped(d_zeta), *d_initial, *d_weights

        return (hidden, *last, *shown), backward

    hidden, *rest = run(zeta, *states, *cell.weights)
    return hidden, rest[: len(states)], rest[len(states) :]


def _forward(cell, zeta, states, weights, mask, save=None):
    """h at first and after each step, the last states, and what steps saved.

    All that they save is needed for `pull`, and else the first `save` of it.

    One array for all h: those before each step and those after it are slices
    of it, without a copy. What is saved is in arrays for each chain.
    """
    length, chains = tf.shape(zeta)[1], _Chains(cell, zeta)

    def step(zeta, states):
        inner = cell.inner(states[0], weights)
        return cell.step(zeta, inner, states, weights)

    states = chains.parted_lists(states)
    rows = zip(chains.parted(zeta[:, 0]), states, strict=True)
    # Only shapes and types of the first step are used, not its values.
    first = [step(*own)[1] for own in rows]
    saved = [[_array(length, tensor) for tensor in own[:save]] for own in first]
    start = chains.joined([own[0] for own in states])
    hidden = _array(length + 1, start).write(0, start)

    zeta = _swapped(zeta)

    def body(t, states, hidden, saved):
        rows = zip(chains.parted(zeta[t]), states, strict=True)
        found = [step(*own) for own in rows]
        masks = chains.parted(None if mask is None else mask[:, t])
        states = [
            _where(mask_t, new, old)
            for mask_t, (new, _), old in zip(masks, found, states, strict=True)
        ]
        saved = [
            [
                array.write(t, tensor)
                for array, tensor in zip(arrays, kept, strict=False)
            ]
            for arrays, (_, kept) in zip(saved, found, strict=True)
        ]
        h = chains.joined([own[0] for own in states])
        return t + 1, states, hidden.write(t + 1, h), saved

    _, last, hidden, saved = _repeat(
        body, (0, states, hidden, saved), zeta.shape[0], length
    )
    known = None if zeta.shape[0] is None else zeta.shape[0] + 1
    hidden = tf.ensure_shape(hidden.stack(), [known, *start.shape])
    return hidden, chains.joined_lists(last), saved


def _stacked(saved):
    """What was saved in arrays for each chain, (T, B, ·)."""
    chains = [[array.stack() for array in arrays] for arrays in saved]
    if len(chains) == 1:
        return chains[0]
    return [tf.concat(each, 1) for each in zip(*chains, strict=True)]


def _backward(cell, zeta, weights, mask, saved, d_hidden, d_last):
    """Cotangents of ζ and of h·U, (T, B, ·), and of the initial states."""
    length, chains = tf.shape(zeta)[1], _Chains(cell, zeta)
    # A product with a transposed operand takes twice the time, at each step.
    transposed = tf.transpose(weights[0])

    def pull(arrays, carried, d_h, mask_t, t):
        carried = [carried[0] + d_h, *carried[1:]]
        zeros = (
            [tf.zeros_like(d) for d in carried] if mask_t is not None else []
        )
        d_zeta, d_inner, d_states = cell.pull(
            [array.read(t) for array in arrays], _where(mask_t, carried, zeros)
        )
        d_product = cell.pull_inner(d_inner, transposed)
        own = d_states[0]
        d_states[0] = d_product if own is None else own + d_product
        if mask_t is not None:
            passed = _where(mask_t, zeros, carried)
            pairs = zip(d_states, passed, strict=True)
            d_states = [own + other for own, other in pairs]
        return d_zeta, d_inner, d_states

    def body(i, carried, arrays):
        t = length - 1 - i
        rows = zip(
            saved,
            carried,
            chains.parted(d_hidden[t + 1]),
            chains.parted(None if mask is None else mask[:, t]),
            strict=True,
        )
        *found, carried = zip(*(pull(*own, t) for own in rows), strict=True)
        written = [
            array.write(t, chains.joined(parts))
            for array, parts in zip(arrays, found, strict=True)
        ]
        return i + 1, list(carried), written

    like = zeta[:, 0]
    arrays = [_array(length, like), _array(length, like)]
    _, d_initial, arrays = _repeat(
        body, (0, chains.parted_lists(d_last), arrays), zeta.shape[1], length
    )
    d_zeta, d_inner = (array.stack() for array in arrays)
    return d_zeta, d_inner, chains.joined_lists(d_initial)


class _Chains:
    """The batch in two halves, whose steps do not wait for each other.

    The steps of a loop are one long chain of products too small for several
    threads; two chains keep two of them busy. With 64 examples and 128 units
    the loops of an LSTM take about two thirds of the time.

    Args:
        cell: the cell.
        zeta: (B, ...).
    """

    def __init__(self, cell, zeta):
        self._sizes = None
        # Masks of dropout are for the whole batch.
        if _keras.on_cpu() and cell.recurrent_masks is None:
            rows = zeta.shape[0]
            rows = tf.shape(zeta)[0] if rows is None else rows
            self._sizes = [rows // 2, rows - rows // 2]

    def parted(self, tensor):
        """(B, ...) or None, for each chain."""
        if self._sizes is None:
            return [tensor]
        return [None] * 2 if tensor is None else tf.split(tensor, self._sizes)

    def joined(self, parts):
        """The inverse of `parted`."""
        return parts[0] if self._sizes is None else tf.concat(parts, 0)

    def parted_lists(self, tensors):
        """A list of tensors for each chain."""
        each = [self.parted(tensor) for tensor in tensors]
        return [list(own) for own in zip(*each, strict=True)]

    def joined_lists(self, parts):
        """The inverse of `parted_lists`."""
        return [self.joined(list(each)) for each in zip(*parts, strict=True)]


def _repeat(step, carried, known, length):
    """Takes so many steps, several in each turn of a loop.

    Args:
        step: maps what is carried, whose first entry is the number of steps
            taken, to what is carried after one more.
        carried: before the first step.
        known: the number of steps, or None if it is not known while tracing.
        length: the number of steps, a tensor.
    """
    at_once = 1 if known is None else min(known, _STEPS_IN_A_TURN)

    def turn(*carried):
        for _ in range(at_once):
            carried = step(*carried)
        return carried

    for _ in range(0 if known is None else known % at_once):
        carried = step(*carried)
    return tf.while_loop(
        lambda t, *_: t < length,
        turn,
        carried,
        # Without it, XLA cannot differentiate the loop.
        maximum_iterations=length // at_once,
    )


def _where(mask, new, old):
    """New where the mask is true; all new without a mask."""
    if mask is None:
        return list(new)
    return [tf.where(mask, n, o) for n, o in zip(new, old, strict=True)]


def _array(length, tensor):
    return tf.TensorArray(
        tensor.dtype, length, element_shape=tensor.shape, clear_after_read=False
    )


def _masked(hidden, mask, zeros):
    """What Keras returns for each step where there is a mask.

    At masked steps that is the output before, and zeros before the first
    unmasked step, whatever the initial state.
    """
    mask = _swapped(mask)
    shown = mask if zeros else tf.cumsum(tf.cast(mask, tf.int32)) > 0
    return tf.where(shown, hidden, tf.zeros_like(hidden))


def _swapped(tensor):
    """(B, T, ·) -> (T, B, ·) and back."""
    return tf.transpose(tensor, [1, 0, 2])


def _column(mask):
    """(B, T) or (B, T, 1) -> (B, T, 1), booleans."""
    mask = tf.cast(mask, tf.bool)
    return mask[..., None] if mask.shape.rank == 2 else mask


def _dropped(sequences, masks):
    """Inputs of all steps under one mask, or (B, T, gates, ·) under a list."""
    if masks is None:
        return sequences
    if isinstance(masks, list):
        return tf.stack([sequences * mask[:, None] for mask in masks], 2)
    return sequences * masks[:, None]


def _times(sequences, kernel):
    """x·W of all steps in one product of matrices, which is faster."""
    flat = tf.reshape(sequences, [-1, kernel.shape[0]])
    shape = tf.concat([tf.shape(sequences)[:2], [kernel.shape[1]]], 0)
    product = tf.reshape(tf.matmul(flat, kernel), shape)
    return tf.ensure_shape(product, [*sequences.shape[:2], kernel.shape[1]])
