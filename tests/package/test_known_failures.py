"""Scenarios that went wrong in public in other systems: each names the tests that hold it here, and a test must exist to be named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

COVERED: dict[str, list[str]] = {
    "1. rows of one, two and three nodes: number and value of log-probabilities": [
        "e2e/test_rollouts.py::test_rows_of_one_two_and_three_nodes"
    ],
    "2. no rows, or only padding": ["e2e/test_rollouts.py::test_no_rows", "e2e/test_rollouts.py::test_only_padding"],
    "3. peak memory linear in tokens": ["lowering/test_attention.py::test_memory_is_linear_in_tokens"],
    "4. token, sequence, group and constant-length reductions": ["e2e/test_rollouts.py::test_reductions"],
    "5. an edited completion moves no other row": [
        "e2e/test_rollouts.py::test_an_edited_completion_moves_no_other_row",
        "e2e/test_rollouts.py::test_an_edited_prompt_moves_every_row",
        "e2e/test_isolation.py::test_an_edited_completion_moves_no_other_row_of_experts",
        "lowering/test_attention.py::test_editing_one_row_moves_no_bit_of_its_siblings",
    ],
    "6. gradient of the first completion token": ["e2e/test_rollouts.py::test_first_completion_token_has_the_dense_gradient"],
    "7. ragged left padding": ["e2e/test_rollouts.py::test_ragged_left_padding_keeps_every_completion"],
    "8. rows shuffled between planning and the call": ["e2e/test_rollouts.py::test_shuffled_rows_are_followed"],
    "9. duplicates, strict prefixes, empty completions": [
        "e2e/test_llama.py::test_llama_equals_dense",
        "e2e/test_qwen3.py::test_qwen3_equals_dense",
    ],
    "10. groups of 1 and 7": ["e2e/test_rollouts.py::test_groups_of_any_size"],
    "11. no_grad or inference first, then training": ["e2e/test_modes.py::test_no_grad_first_then_training"],
    "12. planning again": ["e2e/test_rollouts.py::test_planning_again_gives_the_identical_forest"],
    "13. a run that is dense says so and why": ["e2e/test_refusals.py::test_refused_runs_the_dense_graph", "debug/test_account.py::"],
    "14. a short prefix is not slower than dense": ["e2e/test_isolation.py::test_a_short_prefix_runs_the_dense_graph"],
    "15. lengths that are no multiple of a block": [
        "e2e/test_rollouts.py::test_lengths_around_blocks",
        "lowering/test_attention.py::test_equals_reference",
    ],
    "16. queries that see nothing": [
        "ops/test_attention.py::test_fully_masked_query_gives_zero_and_no_gradient",
        "e2e/test_handwritten.py::test_rope_only_padding_in_a_row",
        "e2e/test_edges.py::test_pads_that_see_every_key_run_densely",
    ],
    "17. window, softcap, sinks, width of values": [
        "lowering/test_attention.py::test_equals_reference_with_options",
        "lowering/test_attention.py::test_equals_reference_for_head_layouts",
        "e2e/test_families.py::test_family_equals_dense",
    ],
    "18. many lengths, few compilations": ["e2e/test_recompiles.py::test_random_forests_compile_twice_at_most_aot_eager"],
    "19. backward of merged passes": ["lowering/test_attention.py::test_backward_with_each_pass_its_own_out_is_wrong"],
    "20. gradients of many segments against float64": ["lowering/test_attention.py::test_equals_reference_with_padding_and_segments"],
    "21. short segments before a convolution, short prompts, a halo across two nodes": [
        "ops/test_causal_conv1d.py::test_equals_dense_rows_of_short_nodes",
        "e2e/test_hybrids.py::test_hybrid_equals_dense_at_borders",
        "e2e/test_forked_states.py::test_planted_faults_are_noticed",
    ],
    "22. gradient through halo and state when one branch asks": [
        "ops/test_many_branches.py::test_a_prompt_has_the_gradient_of_the_one_branch_that_asks"
    ],
    "23. tokens appended after a prefix": [
        "ops/test_causal_conv1d.py::test_what_follows_a_prefix_moves_none_of_its_bits",
        "ops/test_ssd_scan.py::test_what_follows_a_prefix_moves_none_of_its_bits",
        "ops/test_gated_delta_rule.py::test_what_follows_a_prefix_moves_none_of_its_bits",
    ],
    "24. more short branches than 16 bits count": [
        "ops/test_many_branches.py::test_branches_beyond_16_bits",
        "layout/test_forest_tensors.py::test_sizes_beyond_32_bits",
    ],
    "25. equal calls give equal bits": ["determinism/test_replay.py::test_replay"],
    "26. positions that restart in every branch": [
        "e2e/test_packed.py::test_whole_model",
        "ops/test_paths.py::test_counted_columns_are_one_document_although_branches_restart",
    ],
    "27. counts under recomputation, frozen layers, micro-batches": [
        "e2e/test_expert_counts.py::test_once_under_recomputation",
        "e2e/test_mtp.py::test_gradient_accumulation_counts_every_micro_batch_once",
        "e2e/test_mtp.py::test_switched_off_and_in_evaluation",
    ],
    "28. padding in counts": [
        "passes/test_expand_multiplicities.py::test_padding_is_counted_as_by_the_dense_graph",
        "passes/test_expand_multiplicities.py::test_option_leaves_padding_out",
    ],
    "29. multiplicities beyond float32": ["passes/test_expand_multiplicities.py::test_counts_are_exact_beyond_float32"],
    "30. labels, masks and groups of multi-token prediction": [
        "e2e/test_mtp.py::test_equals_dense",
        "e2e/test_mtp.py::test_groupings_are_told_apart",
        "e2e/test_mtp.py::test_an_edited_completion_moves_no_other_row",
    ],
    "31. train and eval, buffers, weights, freezing, autocast": [
        "e2e/test_modes.py::test_eval_and_train_alternate",
        "e2e/test_modes.py::test_buffer_replaced_and_weights_loaded_between_calls",
        "e2e/test_modes.py::test_optimiser_steps_between_calls",
        "e2e/test_modes.py::test_autocast_on_and_off",
        "e2e/test_training_state.py::test_frozen_in_place_where_no_guard_sees_it",
    ],
    "32. branches on data and graph breaks": ["e2e/test_refusals.py::test_data_dependent_branch_runs_the_rest_densely"],
    "33. activation checkpointing": [
        "e2e/test_training_checkpoints.py::test_reentrant",
        "e2e/test_training_checkpoints.py::test_selective",
    ],
    "34. use_cache at its default": ["e2e/test_modes.py::test_use_cache_at_its_default"],
    "35. another backend in the process": ["e2e/test_modes.py::test_another_backend_is_unaffected"],
    "36. determinism switched between calls": ["e2e/test_modes.py::test_deterministic_flag_toggles"],
}


@pytest.mark.parametrize("scenario", COVERED)
def test_scenario_has_tests(scenario: str) -> None:
    for node in COVERED[scenario]:
        file, _, name = node.partition("::")
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name or 'test_'}", text, re.MULTILINE), f"{node} does not exist"


def test_every_scenario_has_an_entry() -> None:
    """Trees and rows, attention, recurrences, experts' counts and look-ahead tokens, compilation."""
    numbers = sorted(int(scenario.partition(".")[0]) for scenario in COVERED)
    assert numbers == [*range(1, 37)]
