"""Device functions that the kernels share: the order of logits, rounding, noise.

    key(x, id) = sortable(fp32 x) << 32 | (0xFFFFFFFF - id)

A larger logit has a larger key; among equal logits the smaller id has; -0 is +0 and NaN comes behind -inf. So the best of
any set, in any order of arrival, is one integer maximum: nothing is reduced twice, and the result is deterministic.

Noise is Philox 4x32-10 with the counter (id, step, row, 0): it depends neither on tiles nor on the batch.
"""

import triton
import triton.language as tl


# The key of nothing at all: no logit has it, since id 0xFFFFFFFF does not exist.
NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def order_keys(logits, ids):
    """int64 keys of fp32 `logits` at int64 `ids`."""
    # Adding zero makes -0 a +0.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = tl.where(logits == logits, rank, -2147483648)
    return (rank.to(tl.int64) << 32) | (0xFFFFFFFF - ids)


@triton.jit
def key_ids(keys):
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


@triton.jit
def round_bf16(values, ROUND: tl.constexpr):
    """fp32 `values` as eager bf16 would leave them, by their bits; unchanged unless `ROUND`."""
    if ROUND:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(values == values, rounded.to(tl.float32, bitcast=True), values)
    else:
        return values


@triton.jit
def tanh(values):
    # The exponential may overflow or vanish: both ends come out right.
    return 1.0 - 2.0 / (tl.exp(2.0 * values) + 1.0)


@triton.jit
def silu(values):
    return values / (1.0 + tl.exp(-values))


@triton.jit
def gumbel_noise(seed, ids, step, row):
    """Standard Gumbel noise for fp32 scores: `-log(E)` with E exponential, exact where E is small and the noise large."""
    zero = ids * 0
    bits, _, _, _ = tl.philox(
        seed, ids.to(tl.uint32), (zero + step).to(tl.uint32), (zero + row).to(tl.uint32), zero.to(tl.uint32)
    )
    # Half a unit off zero; 32 bits of resolution where it matters.
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333432674408))
    far = -tl.log(1.0 - tl.minimum(uniform, 0.99999994))
    return -tl.log(tl.where(uniform < 0.00390625, series, far))
