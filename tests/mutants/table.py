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
    "_api": "loss_functions/test_value_and_grad.py loss_functions models",
    "_api/_loss_function_check": "loss_functions/test_reductions.py",
    "_api/_running_step": "planning/test_tune.py",
    "_api/_train_step": "check/test_loss_check.py train",
    "_api/_tune": "planning/test_tune.py",
    "_arguments": "train/test_reductions.py matrix arguments train",
    "_arguments/_mutable": "models/test_decoding.py",
    "_arguments/_trainable": "matrix train",
    "_arguments/_wrong_call": "errors/test_calls.py errors/test_construction.py",
    "_check": "check/test_loss_check.py check",
    "_check/_layer_checker": "check/test_layer_check.py check/test_report.py",
    "_command": "command processes/test_launch.py",
    "_instructions": "instructions matrix stage train mesh",
    "_instructions/_graph": "instructions/test_result_aliasing.py matrix instructions",
    "_instructions/_program": "train/test_interrupts.py instructions matrix",
    "_instructions/_transfer": "arguments/test_layouts_and_memories.py instructions mesh",
    "_instructions/_stage_bytes": "instructions/test_step_profile.py planning matrix",
    "_jaxprs": "planning/test_printed_plan.py jaxprs stage matrix instructions",
    "_jaxprs/_axis_maps": "jaxprs/test_pieces.py jaxprs/test_random_pieces.py",
    "_jaxprs/_concatenation": "jaxprs/test_pieces.py jaxprs/test_random_pieces.py",
    "_jaxprs/_counted_rows": "jaxprs/test_counted_rows.py",
    "_jaxprs/_dataflow": "jaxprs/test_dataflow.py loss_functions/test_penalties.py",
    "_jaxprs/_divided": "jaxprs/test_pieces.py jaxprs/test_random_pieces.py",
    "_jaxprs/_explicit_dtypes": "arguments/test_layouts_and_memories.py",
    "_jaxprs/_host_memory": "arguments/test_layouts_and_memories.py",
    "_jaxprs/_row_slices": "jaxprs/test_pieces.py jaxprs/test_random_pieces.py",
    "_jaxprs/_piece": "jaxprs/test_pieces.py jaxprs/test_random_pieces.py",
    "_jaxprs/_scans": "stage/test_split_scans.py matrix",
    "_jaxprs/_structural_key": "layers/test_equal_layers.py layers/test_unequal_layers.py",
    "_layers": "matrix layers",
    "_layers/_batch_norm": "layers/test_batchnorm.py matrix",
    "_layers/_linen": "models/test_decoding.py layers matrix",
    "_layers/_parent": "layers/test_shared_modules.py layers/test_nnx_shared.py matrix",
    "_layers/_rng": "test_transparency.py layers/test_nnx_rngs.py",
    "_layers/_sequence": "layers/test_skip.py layers/test_nnx_rngs.py matrix",
    "_layers/_skip": "layers/test_skip.py matrix",
    "_lower": "loss_functions/test_value_and_grad.py train/test_reductions.py loss_functions models matrix instructions stage mesh",
    "_lower/_epilogue": "loss_functions/test_value_and_grad.py train mesh layers",
    "_lower/_tail": "loss_functions/test_whole_batch.py",
    "_lower/_lowering": "loss_functions/test_value_and_grad.py mesh/test_data_axis.py layers train",
    "_lower/_microbatch_inputs": "test_batches.py train/test_replicas.py matrix",
    "_lower/_microbatch_sums": "loss_functions/test_value_and_grad.py mesh/test_data_axis.py layers train",
    "_lower/_prologue": "train/test_reductions.py matrix instructions stage mesh",
    "_lower/_shards": "models/test_meshes_and_replicas.py mesh",
    "_model": "loss_functions/test_value_and_grad.py loss_functions models",
    "_model/_model": "layers planning/test_estimate.py matrix",
    "_partition": "loss_functions/test_value_and_grad.py loss_functions models",
    "_partition/_balanced_cuts": "models/test_calls.py loss_functions models",
    "_partition/_cut_points": "models/test_calls.py loss_functions models planning/test_model_plans.py planning/test_scanned_model_plans.py",
    "_partition/_scan_division": "loss_functions/test_layer_scan_forms.py loss_functions/test_layer_scans.py",
    "_partition/_param_sharding": "train/test_reductions.py matrix instructions stage mesh",
    "_pipelined": "loss_functions/test_value_and_grad.py loss_functions models pipelined",
    "_pipelined/_user_function": "layers/test_skip.py models/test_meshes_and_replicas.py layers loss_functions models matrix mesh",
    "_pipelined/_pipelined_function": "layers loss_functions models matrix mesh",
    "_pipelined/_tracing": "layers/test_skip.py models/test_meshes_and_replicas.py layers loss_functions models matrix mesh",
    "_placed": "test_transparency.py train",
    "_processes": "processes/test_failure.py processes/test_start.py faults processes/test_equal_bits.py",
    "_processes/_environment": "processes/test_launch.py",
    "_stage": "loss_functions/test_value_and_grad.py loss_functions models",
    "_model/_state_axes": "models/test_decoding.py",
    "_stage/_slicing": "models/test_decoding.py loss_functions/test_value_and_grad.py planning/test_estimate.py loss_functions models",
    "_stage/_split_backward": "stage/test_split_scans.py train/test_reductions.py matrix stage train",
    "_stage/_stages": "layers/test_equal_layers.py stage/test_remat_modes.py loss_functions models matrix",
    "_stage/_vjp": "planning/test_printed_plan.py train/test_reductions.py matrix stage train",
    "_trace": "loss_functions/test_value_and_grad.py loss_functions models",
    "_trace/_whole_batch": "loss_functions/test_whole_batch.py",
    "_trace/_raw_keys": "loss_functions/test_value_and_grad.py layers/test_random_keys.py",
    "_trace/_penalty": "loss_functions/test_penalties.py loss_functions models",
    "_trace/_layer_scans": "loss_functions/test_layer_scan_forms.py",
    "_trace/_accumulation": "train/test_reductions.py matrix stage train",
    "_trace/_boundaries": "planning/test_estimate.py loss_functions models layers/test_skip.py matrix",
    "_trace/_eqn_order": "models/test_calls.py loss_functions models",
    "_trace/_example_state": "models/test_decoding.py",
    "_trace/_state_updates": "train/test_model_state.py mesh/test_data_axis.py layers loss_functions models",
    "_train": "test_transparency.py test_batches.py matrix train mesh",
    "_train/_pipelined_loss": "check/test_loss_check.py",
    "_disk": "train/test_checkpoint.py",
    "checkpoint": "train/test_checkpoint.py",
    "draw": "draw",
    "planning": "planning",
    "planning/_ran_steps": "planning/test_ran_steps.py planning/test_profiles_elsewhere.py",
    "planning/_space": "loss_functions/test_whole_batch.py planning",
    "planning/_stage_costs": "planning/test_profile.py planning/test_partition.py planning",
    "schedules": "schedules",
}

# file -> pairs of what stands there and of a fault to put in its place
FAULTS: dict[str, list[tuple[str, str]]] = {
    "_api/_loss_function_check": [
        ("median_key() if is_single_key(leaf)", "leaf if is_single_key(leaf)"),
    ],
    "_api/_running_step": [
        ("peak + workspace[device]", "peak"),
        ("        self._action_seconds = seconds\n", ""),
        ("            target_axes=request.target_axes,\n", ""),
        ("            reduction=request.reduction,\n", ""),
    ],
    "_api/_train_step": [
        ("self._pipelined_loss.check_loss(step.specialization, targets)", "pass"),
    ],
    "_api/_tune": [
        ("key=lambda step: step.median", "key=lambda step: -step.median"),
        ("            self._learn_times()\n", "            pass\n"),
    ],
    "_arguments/_microbatch": [
        ("(i < remainder)", "(i >= num_microbatches - remainder)"),
    ],
    "_arguments/_trainable": [
        ("if _is_param_path(path) and is_inexact(leaf)", "if _is_param_path(path)"),
    ],
    "_arguments/_wrong_call": [
        ("if name in input_names", "if input_names"),
        ("for option in names", "for option in [here]"),
        ("traceback.tb_next is None", "traceback.tb_next is not None"),
        ("follow_wrapped=False", "follow_wrapped=True"),
        ("args[1:] if is_method else args", "args[1:]"),
    ],
    "_check/_layer_checker": [
        ("self._functions.setdefault(function.fingerprint, function)", "function"),
        ("grad if is_trained else None", "grad"),
    ],
    "_check/_loss_check": [
        ("n / sum(sizes) for n", "0.5 for n"),
        ("axis is not None and is_inexact(pair[0])", "False"),
        ("trace_outputs(2 * size)", "trace_outputs(size)"),
    ],
    "_command/_launch": [
        ("PROCESS: str(index)}", "PROCESS: str(0)}"),
    ],
    "_command/_parsers": [
        ('"ms": 1e-3', '"ms": 1e-6'),
    ],
    "_command/_schedules": [
        ("            input_grad + weight_grad,\n", "            input_grad,\n"),
    ],
    "_instructions/_executables": [
        ("last[value] == index", "True"),
    ],
    "_instructions/_graph": [
        ("            taken.add(value)\n", ""),
        ("key = value, place, sharding.split", "key = value, place, None"),
    ],
    "_instructions/_memory": [
        ("+= sign *", "+= abs(sign) *"),
    ],
    "_instructions/_program": [
        ("slot < self._num_arguments for", "slot < 0 for"),
        ("origin = moved_from.get(slot, slot)", "origin = slot"),
    ],
    "_instructions/_transfer": [
        ("[*map(in_default_layout, _local_copies(leaves))]", "_local_copies(leaves)"),
    ],
    "_instructions/_stage_bytes": [
        ("0) - batch_bytes, 0)", "0), 0)"),
    ],
    "_jaxprs/_axis_maps": [
        ("a + (a >= new_axis)", "a"),
        ("if axis not in mixed and", "if"),
        ("and slice_sizes[a] == shape[a]", ""),
        ("if a not in numbers.scatter_dims_to_operand_dims and", "if"),
    ],
    "_jaxprs/_concatenation": [
        ("start - first, stop - first", "start, stop"),
    ],
    "_jaxprs/_counted_rows": [
        ("np.array_equal(value, np.arange(length))", "value[0] == 0"),
        ("and shape[axis] == length", "and shape[axis] >= length"),
        ("along=indices[first_xs:]", "along=indices[:0]"),
        ("if counters.issuperset(starts)", "if not counters.isdisjoint(starts)"),
        (
            "            and not _jaxpr.variables([body",
            "            and _jaxpr.variables([body",
        ),
    ],
    "_jaxprs/_dataflow": [
        ("if next_operands == operands:", "if True:"),
        ('if differentiably and eqn.primitive.name == "stop_gradient":', "if False:"),
        ("    if not bodies or has_rule:", "    if not bodies:"),
        ('return eqn.primitive.name == "cond" and operands[0]', "return False"),
        ('return eqn.primitive.name == "while"', "return False"),
    ],
    "_jaxprs/_divided_bodies": [
        ("            if len(parts) > 1:\n                return None\n", ""),
        ("new.add(self.first_carry + i)", "pass"),
        ("remaining += [k for k in", "_ = [k for k in"),
        ("if computed.setdefault(i, pieces) != pieces:", "if False:"),
        ("computed[i] = all_input_pieces[carry_index]", "pass"),
    ],
    "_jaxprs/_host_memory": [
        ('primitive.name == "device_put" and', 'primitive.name == "" and'),
    ],
    "_jaxprs/_min_cut": [
        ("0 if var in stored_inputs else nbytes(var)", "nbytes(var)"),
        ("if size(stored_vars) > size(", "if size(stored_vars) < size("),
    ],
    "_jaxprs/_piece_slices": [
        ("and not operands.isdisjoint(self.batch_vars)", ""),
    ],
    "_jaxprs/_pieces": [
        ("pairs = _body_operand_axes(eqn, axes)", "pass"),
        ("self.start + first * row", "self.start"),
    ],
    "_jaxprs/_divided_rules": [
        ("        if not {*used} <= {*invars}:\n            return None\n", ""),
    ],
    "_jaxprs/_row_slices": [
        ("or not 0 <= index.item() < pieces.length", ""),
    ],
    "_jaxprs/_piece_evaluation": [
        ("functools.reduce(jax.lax.add, products)", "products[0]"),
        (
            "[joined.regroup(target) if target and is_target else",
            "[joined if True else",
        ),
        ("            order.reverse()\n", "            pass\n"),
        ("            carry = results[:num_carry]\n", ""),
        ("total = combine(total,", "total = jax.lax.add(total,"),
        (
            "ends.update(target.ends)\n        return sizes",
            "pass\n        return sizes",
        ),
    ],
    "_jaxprs/_scans": [
        ('params["reverse"],', "False,"),
    ],
    "_partition/_scan_division": [
        ("_LEAST_PART = 0.5", "_LEAST_PART = 0.01"),
        ("_EQUAL_PIECES_COST = 1.1", "_EQUAL_PIECES_COST = 1.0"),
        ("if len(sizes) > 1:", "if False:"),
        ("params += [first_pieces[i] for i in", "_ = [first_pieces[i] for i in"),
    ],
    "_trace/_layer_scans": [
        ("layer_params[int(start * length)] |= row", "layer_params[0] |= row"),
        ("iterations = length // self.length", "iterations = 1"),
        ("targets.setdefault(var, Pieces(0, sizes))", "pass"),
        ("if self.layer_params:", "if False:"),
        ("                    begins_piece[i] = False", "                    pass"),
    ],
    "_jaxprs/_structural_key": [
        ("_value_key(atom.val) if is_literal", "0 if is_literal"),
        ("return const_keys, tuple(eqn_keys)", "return tuple(eqn_keys)"),
        ("(name, _value_key(x)) for", "(name,) for"),
    ],
    "_layers/_batch_norm": [
        (" + squared * (share_so_far * share / total)", ""),
        ("delta * (share / total)", "delta * share"),
        ("momentum * old + (1 - momentum)", "(1 - momentum) * old + momentum"),
    ],
    "_layers/_linen": [
        ("module.put_variable(collection, name, tied)", "pass"),
    ],
    "_layers/_parent": [
        ("setdefault((first, path), layer)", "setdefault((first, path), 0)"),
        ("(first_layers.index(self._first[i]),)", "(i,)"),
    ],
    "_layers/_rng": [
        ("jax.random.fold_in(key, layer_index) for name", "key for name"),
        ("fold_in(key, step)", "fold_in(key, 0 * step)"),
        ("fold_in(key, 2**31 - 1)", "fold_in(key, 0)"),
    ],
    "_layers/_sequence": [
        ("_rng.layer_rngs(rngs, i)", "_rng.layer_rngs(rngs, 0)"),
    ],
    "_layers/_skip": [
        (
            "Key(name, _namespace.get())\n    if key not in",
            "Key(name, None)\n    if key not in",
        ),
        ("namespace if outer is None else (outer, namespace)", "namespace"),
    ],
    "_lower/_epilogue": [
        ("loss_grad = np.ones((), graph", "loss_grad = np.zeros((), graph"),
        ("return sum(terms[1:], terms[0])", "return terms[0]"),
        ("total.sum(0) if", "total.mean(0) if"),
        ("            loss_weights = []\n", "            pass\n"),
        ("terms[weight_index].append(value)", "terms[weight_index] = [value]"),
        ("grads[i].append(grad)", "grads[i] = [grad]"),
        ("state.commit(old, sums)", "state.commit(old, old)"),
    ],
    "_lower/_join": [
        ("share / share_so_far, weight_dtype", "share, weight_dtype"),
    ],
    "_lower/_tail": [
        ("shard_sizes += [size] * num_shards", "shard_sizes += [1] * num_shards"),
        (
            "zip(column, flags, strict=True):\n                parts +=",
            "zip(column[::-1], flags, strict=True):\n                parts +=",
        ),
    ],
    "_lower/_lowering": [
        ("sorted(of_readers, reverse=True)]", "sorted(of_readers)[:1]]"),
        ("first = m * num_shards", "first = 0 * num_shards"),
        ("var: self._outputs[var, m] for", "var: self._outputs[var, 0] for"),
        ("states[last].has_integers:", "states[last].has_means:"),
    ],
    "_lower/_microbatch_inputs": [
        ("first + begin * step", "first + begin"),
    ],
    "_lower/_microbatch_sums": [
        ("sum(sizes) / self._batch.num_shards", "sum(sizes)"),
        ("share = sizes[m] /", "share = sizes[0] /"),
    ],
    "_lower/_prologue": [
        ("total = total + weigh", "total = weigh"),
    ],
    "_lower/_shards": [
        ("[array[shard] for", "[array[0] for"),
    ],
    "_model/_model": [
        ("if next_stages in ([], [stage]):", "if not next_stages:"),
    ],
    "_partition/_balanced_cuts": [
        ("change[reader + 1] -=", "change[reader] -="),
        ("max(self.largest_cost, cost)", "self.largest_cost + cost"),
        ("_AS_FEW_BYTES = 1.01", "_AS_FEW_BYTES = 1.0"),
        ("bool(_jaxpr.bodies(eqns[index - 1])) and", "False and"),
        ("scans[next_scan - 1] + 1", "0"),
        ("cost_before[index] + reach), last + 1)", "np.inf), last + 1)"),
    ],
    "_partition/_cut_points": [
        ("differences = abs(", "differences = 0 * abs("),
        ("np.maximum.reduceat", "np.add.reduceat"),
    ],
    "_pipelined/_pipelined_function": [
        ("are_merged = batch.num_microbatch_shards > 1", "are_merged = True"),
    ],
    "_pipelined/_tracing": [
        ("size / batch.num_examples", "size / sum(batch.sizes)"),
    ],
    "_pipelined/_user_function": [
        ("local_args = args[:2] if", "local_args = args[:0] if"),
    ],
    "_placed/_mirrored_places": [
        ("in range(1, len(leaf.path) - 1)", "in range(len(leaf.path))"),
    ],
    "_placed/_segments": [
        ("(num_bytes[p], p in", "(-num_bytes[p], p in"),
        ("if last_waves and not stays:", "if False:"),
        ("result_index.get(id(atom), len", "-result_index.get(id(atom), len"),
    ],
    "_processes/_environment": [
        ("if not seconds > 0:", "if seconds < 0:"),
        ("if value and value not in TRANSPORTS:", "if False:"),
    ],
    "_processes/_group": [
        ("if len(processes) > 1:\n            values", "if False:\n            values"),
    ],
    "_processes/_rendezvous": [
        ("if count != self._num_processes or", "if"),
        ("refusal = refusal or str(error)", "refusal = ''"),
    ],
    "_processes/_transport": [
        ("move & (1 << _MOVE_BITS) - 1", "0"),
    ],
    "_stage/_slicing": [
        ("homes[new_value] = min(readers)", "pass"),
        ("return tangent & _jaxpr.ancestors(jaxpr, ends)", "return tangent"),
        ("if not tangent.isdisjoint(_jaxpr.variables(traced.loss_weight))", "if 0"),
        ("== EqnKind.STAGE and id(eqn) in needed", "== EqnKind.STAGE"),
        ("]] = unmark(eqn.invars[0])", "]] = eqn.invars[0]"),
    ],
    "_stage/_split_backward": [
        ("_LARGEST_RATIO = 2", "_LARGEST_RATIO = 200"),
        ("        if not missing:\n", "        if True:\n"),
        ("if all(map(_min_cut.is_cheap, second.jaxpr.eqns)):", "if False:"),
        ("if halves is not None:", "if False:"),
    ],
    "_stage/_stage_functions": [
        ("[*[None] * self.slice.num_trained, *grads]", "[*grads, *grads]"),
    ],
    "_stage/_stages": [
        (
            "key = self.structural_key(stage_index, microbatch), mode",
            "key = self.structural_key(stage_index, 0)",
        ),
        (
            "len(self.prologue.jaxpr.outvars) - 1",
            "len(self.prologue.jaxpr.outvars) - 2",
        ),
    ],
    "_stage/_vjp": [
        (
            "is_recomputable=is_weight, is_stored=is_stored",
            "is_recomputable=is_weight, is_stored=[not x for x in is_weight]",
        ),
    ],
    "_trace/_accumulation": [
        ("jnp.where(value == mean, mean, both)", "both"),
        ("[total + term.astype(total.dtype) for", "[term.astype(total.dtype) for"),
        ("dtype.itemsize < 4", "dtype.itemsize < 2"),
    ],
    "_trace/_boundaries": [
        ("names.get(var) or name", "name"),
        ("value if was_marked else marked", "marked"),
        ("[int(stage)] = index + 1", "[int(stage)] = index"),
        (" and not is_mark(eqns[index + 1])", ""),
    ],
    "_trace/_eqn_order": [
        ("target[index] = first_reader", "target[index] = index"),
        ("if total_bytes(held) <= total_bytes(eqn.outvars):", "if True:"),
    ],
    "_trace/_folded_numbers": [
        ("np.asarray(x.val, x", "np.asarray(0 * x.val, x"),
    ],
    "_trace/_penalty": [
        (
            "data *= jnp.asarray(scale, data.dtype)",
            "data *= jnp.asarray(1, data.dtype)",
        ),
        ("data + penalty * jnp.asarray(share, data.dtype)", "data + penalty"),
        ("len(factors) == 1", "len(factors) >= 1"),
        (" and not is_divisor", ""),
        ("enters=adds_up", "enters=False"),
        ("if is_scan and any(is_of_examples[carry.stop :]):", "if False:"),
        ("            indices |= more\n", "            break\n"),
        ("not sums.is_inside and ", ""),
    ],
    "_trace/_raw_keys": [
        ("wrap(args[i]), args[-1])", "wrap(args[i]), 0)"),
        ("_jaxpr.replace_leaves(results, unfolded, is_words)", "results"),
        ("wraps = inner.wraps | wraps", "pass"),
    ],
    "_trace/_state_updates": [
        ("weight = share / (share_so_far + share)", "weight = share"),
        ("new[norm.var] = new[norm.var] / share", "pass"),
        ("old[i], new[i], momentum", "old[i], new[i], 0.0"),
        (
            "extended.append(value)",
            "extended.append(value if is_inexact(mean) else mean)",
        ),
        ("return list(new)", "return list(sums)"),
        ("sum_spec(new if is_inexact(old) and", "sum_spec(new if False and"),
        ("stage = max(stage_of_leaf", "stage = min(stage_of_leaf"),
        ("if first_index + i not in", "if i not in"),
        ("if origins[i] != leaf.param_index]", "]"),
    ],
    "_trace/_whole_batch": [
        ("if operands & behind_any:", "if False:"),
        ("if any(key != keys[0] for key in keys):", "if False:"),
        ("roots += traced.batch_inputs", "roots += []"),
    ],
    "_trace/_traced_function": [
        ("microbatch_key(leaf, index) if", "microbatch_key(leaf, 0) if"),
        ("_rng.microbatch_key(leaf, index) if", "leaf if"),
        ("is_cheap(eqn) and not _has_custom_vjp(eqn)", "is_cheap(eqn)"),
        ("may_be_key += [not split for split in is_split]", "may_be_key += is_split"),
        ("closed = _boundaries.drop_unread_eqns(closed)", "pass"),
    ],
    "_train/_optimizer": [
        (
            "            (placement.place_of(stage), sharding)\n",
            "            (placement.place_of(0), sharding)\n",
        ),
    ],
    "_train/_finite_update": [
        ("jnp.isfinite(value).all() for", "jnp.isfinite(value).any() for"),
        ("if value != old[index]:", "if False:"),
        ("select(value, old_values[var]) if", "value if"),
    ],
    "_train/_lowered_step": [
        ("*_rng.step_keys(rngs, step), step + 1", "*_rng.step_keys(rngs, step), step"),
        ("new_state[self.variable_indices[leaf]] = value", "pass"),
    ],
    "_train/_pipelined_loss": [
        ("if not any(map(_is_spec, jax.tree.leaves(targets))):", "if True:"),
    ],
    "_train/_transformation": [
        ("else jnp.zeros_like(param)", "else jnp.ones_like(param)"),
    ],
    "checkpoint": [
        ("        if later_step < step:", "        if True:"),
        ("return type(like)(values.item())", "return values.item()"),
        ("in reversed(steps):", "in steps:"),
    ],
    "_disk/_leaf_entries": [
        ("if not is_intact or types", "if types"),
    ],
    "_disk/_state_reader": [
        ("if digest and digest_values", "if False and digest_values"),
    ],
    "_disk/_state_writer": [
        ("cleanup_tmp_directories=True", "cleanup_tmp_directories=False"),
        ("_compat.run_before_threads_end(self.finish)", "pass"),
        ("max_to_keep=keep,", "max_to_keep=keep + 1,"),
    ],
    "draw/_bars": [
        ("            x += length\n", ""),
    ],
    "draw/_plan_bars": [
        ("if end[forward] == start[action]:", "if False:"),
    ],
    "draw/_trace": [
        ("clock.microseconds_inside(need, 0.99)", "clock.microseconds_inside(need, 1)"),
        ("(time - self.timeline.begin) * self.unit", "time * self.unit"),
    ],
    "draw/_transfers": [
        ("if compute_end < end:", "if False:"),
    ],
    "planning/_bottleneck_cut": [
        ("starts = latency + transfers if stage else latency", "starts = latency"),
    ],
    "planning/_cut_search": [
        ("(np.diff(neighbors) > 0)", "(np.diff(neighbors) >= 0)"),
        ("waits = loads.sum(axis=0) - bottlenecks", "waits = loads.sum(axis=0)"),
        ("if lower_bound >= shortest_step:", "if lower_bound >= 0:"),
        ("bottlenecks + waits + between", "bottlenecks"),
    ],
    "planning/_describe": [
        ("and (output, place) not in sent", ""),
        ("place != placement.place_of(source, 0) and ", ""),
        ("stage > source + 1", "stage > source"),
    ],
    "planning/_finalists": [
        ("for forecast in faster[:_NUM_LOWERED]:", "for forecast in []:"),
        (
            "peak - forecast.parameters - forecast.gradients",
            "peak - forecast.gradients",
        ),
        (
            "families.setdefault(space.choices.builders[name].family, [])",
            "families.setdefault(0, [])",
        ),
    ],
    "planning/_forecast": [
        ("hops = 2 * (num_shards - 1)", "hops = 2 * num_shards"),
        ("int(counted.activations) + copied_bytes", "int(counted.activations)"),
    ],
    "planning/_fused": [
        ("max(input_grads[0] + weight_grads[0] -", "max(weight_grads[0] -"),
        ("    input_grads[0] = 0.0\n", ""),
        (
            "for microbatch in fused_microbatches:",
            "for microbatch in microbatches:",
        ),
    ],
    "planning/_in_flight": [
        ("is_fused = stage == last and", "is_fused = False and"),
        ("transfer.sender[transfer.sent] += 1", "transfer.sender[transfer.sent] += 0"),
        ("self._sent_back[target].append(", "self._sent_back[source].append("),
        ("for outputs in self._outputs[stage]:", "for outputs in ():"),
        ("held[Held.PENDING] += 1", "held[Held.PENDING] += 0"),
    ],
    "planning/_origin": [
        ("if name in origin and origin[name]", "if origin.get(name)"),
        (
            'return is_measured and origin.get(DEVICE, "").startswith("cpu (")',
            "return is_measured",
        ),
    ],
    "planning/_plan_search": [
        ("max(sum(layers) / num_ranks, *layers)", "max(sum(layers), *layers)"),
        ("if outline.least_seconds >= best_seconds:", "if best_seconds < math.inf:"),
        (
            "least_seconds = problem.num_microbatches * busiest",
            "least_seconds = 2 * problem.num_microbatches * busiest",
        ),
    ],
    "planning/_problem": [
        ("num_bytes - self.max_bytes[rank]", "num_bytes"),
        ("& (other.times < best.times)", "& (other.times > best.times)"),
    ],
    "planning/_scaled_profiles": [
        ("(self.size - self.small) / (", "(self.large - self.size) / ("),
        ("max(value, small * self.size / self.small)", "max(value, 0.0)"),
        ("large.microbatch_size < size", "large.microbatch_size > size"),
        ("small_by_ends.get(ends, no_skip)", "small_by_ends.get(ends, skip)"),
        ("int(num_bytes * ratios.get(mode, 1.0))", "num_bytes"),
    ],
    "planning/_ran_steps": [
        ("seconds_of(action) - call", "seconds_of(action)"),
        ("predicted[stage] - other[stage]", "predicted[stage]"),
        ("halves=backward[stage]", "halves=1.0"),
        ("halves=self.halves * other.halves", "halves=self.halves"),
        ("fewest = min(", "fewest = max("),
        ("np.log(count), np.log(counts)", "count, counts"),
        ("        larger = scale_layers(larger, factors)\n", "        pass\n"),
    ],
    "planning/_rank_bytes": [
        ("self.static + self.gradients + ", "self.static + "),
        ("workspace = workspace + residuals[bound]", "pass"),
        ("np.maximum(workspace, exchange - activations)", "workspace"),
        ("boundary_bytes(bound[0])", "boundary_bytes(0)"),
    ],
    "planning/_space": [
        ("if self.needs_forwards_first and", "if False and"),
    ],
    "planning/_stage_costs": [
        ("max(first_layer, previous_reader + 1)", "first_layer"),
        (
            "begin : skip.target + 1] += skip.bytes",
            "begin : skip.target] += skip.bytes",
        ),
    ],
    "planning/_stage_times": [
        (" + link.seconds(layer.cotangent_bytes)\n", "\n"),
        ("key.crosses_after * halves", "halves"),
        ("if self._link.overlap else 0.0", "if True else 0.0"),
        ("shares.append(num_split / max(num_backwards, 1))", "shares.append(0.0)"),
    ],
    "planning/_traced_layers": [
        ("reader in range(layer + 1, len(self.names))", "reader in [layer + 1]"),
        ("if precision == default_precision:", "if False:"),
    ],
    "schedules/_action_tables": [
        ("delta -= sum(look_up(", "delta -= 0 * sum(look_up("),
        ("if stage == 0:\n", "if True:\n"),
        ("return sum(times) / 2", "return sum(times)"),
        ("if self.costs.overlap\n", "if True\n"),
    ],
    "schedules/_bound": [
        ("first_half = min(whole, input_grad)", "first_half = input_grad"),
    ],
    "schedules/_costs": [
        ("[*neighbours, *self.skips]", "[*neighbours]"),
    ],
    "schedules/_improve": [
        ("if shifted.makespan >= simulated.makespan:", "if True:"),
    ],
    "schedules/_catalogue": [
        ("zb_v, place_in_v, split_share=1.0", "zb_v, place_in_v"),
        ("looped_bfs, _place_in_two_rounds", "looped_bfs, place_in_line"),
    ],
    "schedules/_placement": [
        ("if op == FORWARD:", "if True:"),
    ],
    "schedules/_simulate": [
        ("end=start + seconds)", "end=start + 2 * seconds)"),
    ],
    "schedules/_timeline": [
        ("min(start + tables.receive_times[action_id], end)", "min(start, end)"),
        ("end - tables.send_times[action_id]", "end"),
    ],
}

MUTANTS = [
    Mutant(f"{file}.py", old, new)
    for file, faults in FAULTS.items()
    for old, new in faults
]
