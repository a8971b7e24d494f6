"""Faults of one line, each of which some test must notice.

A sign, a term that is left out, a number that is off by one, a pair that is exchanged,
a scale that is forgotten: in every file that computes.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault.

    Attributes:
      file: the file in the library.
      old: some of its text, which stands there once.
      new: what stands there instead.
    """

    file: str
    old: str
    new: str


# Which folders or files of tests reach a file, by the start of its name: first those
# that find most.
REACHED_BY = {
    "_check": "functions/test_loss_check.py check",
    "_functions": "train/test_reductions.py matrix functions train",
    "_functions/_trainable": "matrix train",
    "_functions/_vjp": "test_plan.py matrix",
    "_instructions": "instructions matrix run train mesh",
    "_instructions/_graph": "run/test_own_results.py matrix instructions",
    "_instructions/_program": "train/test_interrupts.py instructions matrix",
    "_jaxprs": "test_plan.py functions matrix run",
    "_instructions/_stage_bytes": "run/test_profile.py planning matrix",
    "_jaxprs/_alike": "layers/test_equal_layers.py layers/test_unequal_layers.py",
    "_jaxprs/_loops": "matrix",
    "_layers": "matrix layers",
    "_layers/_batchnorm": "layers/test_batchnorm.py matrix",
    "_layers/_rng": "test_transparency.py layers/test_nnx_rngs.py",
    "_layers/_parent": "layers/test_shared_modules.py layers/test_nnx_shared.py matrix",
    "_layers/_sequence": "layers/test_skip.py layers/test_nnx_rngs.py matrix",
    "_layers/_skip": "layers/test_skip.py matrix",
    "_placed": "test_transparency.py train",
    "_run": "train/test_reductions.py matrix run mesh",
    "_run/_incoming": "test_batches.py train/test_replicas.py matrix",
    "_slices": "slices/test_value_and_grad.py slices",
    "_slices/_checked": "slices/test_reductions.py",
    "_slices/_cut": "slices/test_model_calls.py slices",
    "_slices/_cuts": "slices/test_model_calls.py slices planning/test_models.py",
    "_slices/_epilogue": "slices/test_value_and_grad.py train mesh layers",
    "_slices/_model": "layers planning/test_estimate.py matrix",
    "_slices/_pipelined_function": "layers slices matrix mesh",
    "_slices/_tracing": "layers slices matrix mesh",
    "_slices/_lower": "slices/test_value_and_grad.py mesh/test_data.py layers train",
    "_slices/_marks": "planning/test_estimate.py slices layers/test_skip.py matrix",
    "_slices/_order": "slices/test_model_calls.py slices",
    "_slices/_prologue": "train/test_reductions.py matrix run mesh",
    "_slices/_shards": "slices/test_meshes.py mesh",
    "_slices/_slice": "slices/test_value_and_grad.py planning/test_estimate.py slices",
    "_slices/_stages": "layers/test_equal_layers.py run/test_remat.py slices matrix",
    "_slices/_state": "train/test_model_state.py mesh/test_data.py layers slices",
    "_train": "test_transparency.py test_batches.py matrix train mesh",
    "planning": "planning",
    "schedules": "schedules",
}

CHECK = [("_loss", "n / sum(sizes) for n", "0.5 for n")]
FUNCTIONS = [
    ("_microbatch", "(i < remainder)", "(i >= num_microbatches - remainder)"),
    (
        "_trainable",
        "if _is_param_path(path) and is_inexact(leaf)",
        "if _is_param_path(path)",
    ),
    (
        "_vjp",
        "variables, is_weight, is_at_hand)",
        "variables, is_weight, [not x for x in is_weight])",
    ),
    ("_weights", "jnp.where(value == mean, mean, both)", "both"),
    (
        "_weights",
        "[total + term.astype(total.dtype) for",
        "[term.astype(total.dtype) for",
    ),
    ("_weights", "dtype.itemsize < 4", "dtype.itemsize < 2"),
]
JAXPRS = [
    ("_alike", "_value(one.val) if is_literal", "0 if is_literal"),
    ("_alike", "tuple(map(Same, closed.consts)), tuple(eqns)", "tuple(eqns)"),
    ("_alike", "(name, _value(x)) for", "(name,) for"),
    ("_cheapest", "0 if v in at_hand else nbytes(v)", "nbytes(v)"),
    ("_cheapest", "if size(found) > size(", "if size(found) < size("),
    ("_loops", 'params["reverse"],', "False,"),
]
INSTRUCTIONS = [
    ("_stage_bytes", "0) - extra, 0)", "0), 0)"),
    ("_bytes", "+= sign *", "+= abs(sign) *"),
    ("_donated", "last[value] == index", "True"),
    ("_graph", "            taken.add(value)\n", ""),
    ("_graph", "key = value, place, sharding.cut", "key = value, place, None"),
    ("_program", "slot < self._num_arguments for", "slot < 0 for"),
]
LAYERS = [
    ("_batchnorm", " + squared * (share_so_far * share / total)", ""),
    ("_batchnorm", "delta * (share / total)", "delta * share"),
    (
        "_batchnorm",
        "momentum * old + (1 - momentum)",
        "(1 - momentum) * old + momentum",
    ),
    (
        "_rng",
        "jax.random.fold_in(key, layer_index) for name",
        "key for name",
    ),
    ("_rng", "fold_in(rng, step)", "fold_in(rng, 0 * step)"),
    ("_rng", "fold_in(key, 2**31 - 1)", "fold_in(key, 0)"),
    ("_parent", "setdefault((first, names), layer)", "setdefault((first, names), 0)"),
    ("_parent", "(firsts.index(self._first[i]),)", "(i,)"),
    ("_sequence", "_rng.layer_rngs(rngs, i)", "_rng.layer_rngs(rngs, 0)"),
    (
        "_skip",
        "(frame.namespace, name)\n    if key not in",
        "(None, name)\n    if key not in",
    ),
]
PLANNING = [
    ("_problem", "2 * self.profile.params_of +", "self.profile.params_of +"),
    ("_problem", "[x.output_bytes + x.cotangent_bytes for", "[x.output_bytes for"),
    (
        "_cuts",
        "starts = latency + transfers if stage else latency",
        "starts = latency",
    ),
    (
        "_cuts",
        "(num_microbatches - 1) * self.bottleneck",
        "num_microbatches * self.bottleneck",
    ),
    ("_forecast", "max(inputs[0] + weights[0] -", "max(weights[0] -"),
    ("_forecast", "    inputs[0] = 0.0\n", ""),
    ("_forecast", "[other if m in joined else numbers[last] for", "[other for"),
    ("_forecast", "workspace[i] += int(", "workspace[i] += 0 * int("),
    ("_forecast", " - first] += skip.bytes", " - first] -= skip.bytes"),
    ("_replicate", "hops = 2 * (replicas - 1)", "hops = 2 * replicas"),
]
PLACED = [
    ("_by_path", "in range(1, len(leaf.path) - 1)", "in range(len(leaf.path))"),
    ("_segments", "(num_bytes[p], p in", "(-num_bytes[p], p in"),
]
RUN = [
    ("_incoming", "first + begin * step", "first + begin"),
]
SCHEDULES = [
    ("_bound", "first_half = min(whole, input_grad)", "first_half = input_grad"),
    ("_costs", "[*neighbours, *self.skips]", "[*neighbours]"),
    ("_simulate", "end=start + seconds)", "end=start + 2 * seconds)"),
    ("_tables", "delta -= sum(look_up(", "delta -= 0 * sum(look_up("),
    ("_tables", "if stage == 0:\n", "if True:\n"),
]
SLICES = [
    ("_checked", "half_key() if is_single_key(leaf)", "leaf if is_single_key(leaf)"),
    ("_cuts", "differences = abs(", "differences = 0 * abs("),
    ("_cut", "change[reader + 1] -=", "change[reader] -="),
    ("_cut", "max(self.largest_cost, cost)", "self.largest_cost + cost"),
    ("_epilogue", "one = np.ones((), graph", "one = np.zeros((), graph"),
    ("_epilogue", "return sum(others, first)", "return first"),
    ("_epilogue", "total.sum(0) if", "total.mean(0) if"),
    ("_epilogue", "            loss_weights = []\n", "            pass\n"),
    ("_epilogue", "terms[weight].append(value)", "terms[weight] = [value]"),
    ("_epilogue", "grads[i].append(grad)", "grads[i] = [grad]"),
    ("_epilogue", "state.commit(old, sums)", "state.commit(old, old)"),
    ("_prologue", "total = total + loss_weight", "total = loss_weight"),
    ("_folds", "np.asarray(x.val, x", "np.asarray(0 * x.val, x"),
    ("_join", "share / seen, jnp", "share, jnp"),
    (
        "_model",
        "        skips |= {key: marked[number] for number, key in numbered.items()}\n",
        "",
    ),
    ("_lower", "sorted(of_readers, reverse=True)]", "sorted(of_readers)[:1]]"),
    ("_stage", "[*[None] * self.num_trained, *grads]", "[*grads, *grads]"),
    ("_lower", "first = m * shards", "first = 0 * shards"),
    ("_lower", "var: self._made[var, m] for", "var: self._made[var, 0] for"),
    ("_lower", "sum(sizes) / self._batch.num_shards", "sum(sizes)"),
    ("_lower", "part = sizes[m] /", "part = sizes[0] /"),
    ("_lower", "states[last].has_integers:", "states[last].has_means:"),
    ("_marks", "] = stage, tree", "] = stage, 0"),
    ("_marks", "[numbers[0]] = index + 1", "[numbers[0]] = index"),
    ("_marks", " and not is_mark(eqns[index + 1])", ""),
    ("_order", "target[index] = first_reader", "target[index] = index"),
    ("_order", "if total_bytes(held) <= total_bytes(eqn.outvars):", "if True:"),
    ("_program", "microbatch_key(leaf, number) if", "microbatch_key(leaf, 0) if"),
    ("_program", "microbatch_key(key, args[-1])", "microbatch_key(key, 0)"),
    ("_slice", "return tangent & _jaxpr.ancestors(jaxpr, ends)", "return tangent"),
    (
        "_slice",
        'eqn.primitive.name != "stop_gradient" and is_inexact(v.aval)',
        "is_inexact(v.aval)",
    ),
    ("_slice", "if not tangent.isdisjoint(_jaxpr.variables(program.weight))", "if 0"),
    ("_slice", 'if kind == "stage" and id(eqn) in needed', 'if kind == "stage"'),
    ("_slice", "]] = before(eqn.invars[0])", "]] = eqn.invars[0]"),
    ("_program", "microbatch_key(leaf, number) if", "leaf if"),
    (
        "_tracing",
        "whole = sum(batch.sizes) * batch.num_shards",
        "whole = sum(batch.sizes)",
    ),
    ("_tracing", "local_args = args[:2] if", "local_args = args[:0] if"),
    ("_pipelined_function", "merging(batch.num_parts > 1)", "merging(True)"),
    (
        "_stages",
        "key = self.kind(stage, microbatch), mode",
        "key = self.kind(stage, 0)",
    ),
    ("_shards", "[array[shard] for", "[array[0] for"),
    ("_state", "weight = share / (seen + share)", "weight = share"),
    ("_state", "new[var] / share, seen, share", "new[var], seen, share"),
    ("_state", "commit(old[at], new[at], momentum)", "commit(old[at], new[at], 0.0)"),
    ("_state", "            else x\n", "            else old\n"),
    ("_state", "return list(new)", "return list(sums)"),
    ("_state", "sum_spec(new if is_inexact(old) and", "sum_spec(new if False and"),
    ("_state", "max(stage[mean], stage[var])", "min(stage[mean], stage[var])"),
    ("_state", "if first + i not in state.leaves:", "if i not in state.leaves:"),
    ("_state", "if origins[i] != leaf.at]", "]"),
    (
        "_summands",
        "jnp.asarray(scale, data.dtype), *aux",
        "jnp.asarray(1, data.dtype), *aux",
    ),
    ("_summands", "data + penalty * jnp.asarray(share, data.dtype)", "data + penalty"),
    ("_summands", "sum(of_examples) == 1", "sum(of_examples) >= 1"),
    ("_summands", " and not is_divisor", ""),
]
TRAIN = [
    (
        "_optimizer",
        "            (pipe.place(stage), sharding)\n",
        "            (pipe.place(0), sharding)\n",
    ),
    ("_transformation", "else jnp.zeros_like(param)", "else jnp.ones_like(param)"),
    ("_step", "_rng.step_key(rng, step), step + 1", "_rng.step_key(rng, step), step"),
    (
        "_step",
        "new_state[self.variable_indices[leaf]] = value",
        "pass",
    ),
]

MUTANTS = [
    Mutant(f"{folder}/{file}.py", old, new)
    for folder, mutants in {
        "_functions": FUNCTIONS,
        "_jaxprs": JAXPRS,
        "_instructions": INSTRUCTIONS,
        "_check": CHECK,
        "_layers": LAYERS,
        "_placed": PLACED,
        "_run": RUN,
        "_slices": SLICES,
        "_train": TRAIN,
        "planning": PLANNING,
        "schedules": SCHEDULES,
    }.items()
    for file, old, new in mutants
]
