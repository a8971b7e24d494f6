"""Primitives of JAX by what they cost."""

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz
    complex conj cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge
    gt imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max
    min mul ne neg nextafter not one_minus_square or polynomial population_count pow
    real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor
"""
_MOVES = """
    bitcast_convert_type broadcast broadcast_in_dim concatenate convert_element_type
    copy copy_p dynamic_slice dynamic_update_slice empty empty2 expand_dims gather iota
    name pad random_unwrap random_wrap reshape rev slice split squeeze stack
    stop_gradient tile transpose unstack
"""
_REDUCTIONS = """
    argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor
"""
_SORTS = "cumlogsumexp cummax cummin cumprod cumsum sort top_k"
_DRAWS = """
    random_bits random_fold_in random_gamma random_seed random_split rng_bit_generator
    rng_uniform threefry2x32
"""
_CALLS = "cond custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr jit pjit"

# Each element of the result follows from the elements at the same index.
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
# Nothing is computed.
MOVES = frozenset(_MOVES.split())
# One result follows from many elements.
REDUCTIONS = frozenset(_REDUCTIONS.split())
# Computed again in less time than it takes to read what was stored.
CHEAP = MOVES | REDUCTIONS | ELEMENTWISE
# They cost as much as what is inside.
CALLS = frozenset(_CALLS.split())
PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
# Random bits: a hundred operations for each, and for XLA to compile.
DRAWS = frozenset(_DRAWS.split())
# Expensive, unless what is stored for them is more than products are.
SORTS = frozenset(_SORTS.split())
