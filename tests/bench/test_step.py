"""The step bench: its baselines mean what dense rows mean, its gates can turn red, and all of it runs on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

from bench import step, step_gates, step_report
from bench.models import decoders, objectives
from sp_compile.layout.forest import Forest

CASE = step.Case("star", prompt=11, rows=3, completion=4, groups=2)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", ["labels", "policy"])
@pytest.mark.parametrize("name", ["flex_tree", "gathered"])
def test_baselines_equal_dense_rows(name: str, loss: str) -> None:
    dense = decoders.build("qwen3", layers=1, small=True)
    packed = decoders.build("qwen3", layers=1, small=True, attention=objectives.register(name))
    batch = CASE.batch(512, 0, "cpu")
    forest, inputs = objectives.packed_inputs(batch)
    assert forest.num_tokens == 2 * (11 + 3 * 4)
    want = objectives.Rows(dense, loss)(**batch)["loss"]
    found = objectives.Packed(packed, loss)(**inputs, **objectives.BASELINES[name][1](forest, torch.device("cpu")))["loss"]
    want.backward()
    found.backward()
    errors = step_gates.Errors.of((found.detach(), gradients(packed)), (want.detach(), gradients(dense)))
    assert max(errors.loss, errors.gradients) < 1e-5


def test_cases_share_what_they_say() -> None:
    for case, sharing in zip(step.CASES, (1.0, 2.0, 5.0, 4.5, 5.0), strict=True):
        small = case.shrunk(32)
        forest = Forest.from_tokens(small.batch(1 << 30, 3, "cpu")["input_ids"])
        assert forest.sharing == pytest.approx(sharing)
        assert forest.num_tokens == small.groups * (small.prompt + small.rows * small.completion)


def test_gate_of_errors() -> None:
    want = torch.tensor(2.0), {"a": torch.ones(4), "b": torch.zeros(3)}

    def run(loss: float, wrong: float, b: float = 0.0) -> step_gates.Errors:
        return step_gates.Errors.of((torch.tensor(loss), {"a": torch.ones(4) * (1 + wrong), "b": torch.full((3,), b)}), want)

    dense = run(2.002, 0.01)
    assert run(2.002, 0.012).beyond(dense) == []
    assert run(2.002, 0.0199).beyond(dense, gate=2.0) == []
    assert [said.split(" ")[0] for said in run(2.02, 0.01).beyond(dense)] == ["loss"]
    assert run(2.002, 0.013).beyond(dense)[0].startswith("gradients are off")
    assert any("gradient of b" in said for said in run(2.002, 0.01, b=1e-5).beyond(dense))
    assert run(float("nan"), float("nan")).beyond(dense)


def test_gate_of_counts() -> None:
    chosen = torch.tensor([[[0, 1], [1, 2]]])
    assert step_gates.wrong_counts({}) == []
    assert step_gates.wrong_counts({"chosen": chosen, "counts": torch.tensor([[1, 2, 1]])}) == []
    assert step_gates.wrong_counts({"chosen": chosen, "counts": torch.tensor([[1, 1, 1]])})


def test_gate_of_the_account() -> None:
    ran: dict[str, Any] = {"refused": (), "shared": True, "physical_tokens": 4, "logical_tokens": 6}
    assert step_gates.wrong_run(SimpleNamespace(**ran), 4, 1.5) == []
    for changed in ({"shared": False}, {"physical_tokens": 6}, {"refused": ("no rule",)}):
        assert step_gates.wrong_run(SimpleNamespace(**ran | changed), 4, 1.5)


def test_a_red_implementation_has_no_ratio() -> None:
    case: dict[str, Any] = {"steps": {"dense": {"median_ms": 4.0}, "shared": {"median_ms": 2.0}}}
    assert step_report.speedup(case, "shared") == 2.0
    assert step_report.speedup({"steps": {"dense": {"median_ms": 4.0}}}, "shared") is None
    case["steps"]["dense_static"] = {"median_ms": 3.0}
    assert step_report.speedup(case, "shared") == 1.5, "against the faster of the dense ones"


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("triton_red_fused__to_copy_add_mul_3", "fused"),
        ("void at::native::index_put_with_sort_kernel<...>", "rows"),
        ("Memcpy DtoH (Device -> Pageable)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "other"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert step_report.kind_of(kernel) == kind


def test_outputs_of_several_processes_become_one(tmp_path: Path) -> None:
    head = {"date": "today", "command": "one", "versions": {"torch": "2"}, "repeats": 5}
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, changed in zip(paths, ({}, {"command": "two", "date": "later"}, {"versions": {"torch": "3"}}), strict=True):
        path.write_text(json.dumps(head | {"cases": [path.name]} | changed))
    assert step.main(["--merge", *map(str, paths[:2]), "--out", str(tmp_path / "all")]) == 0
    assert json.loads((tmp_path / "all").read_text()) == head | {"cases": ["a", "b"], "command": "one; two"}
    with pytest.raises(ValueError, match="other versions"):
        step_report.merge(paths, tmp_path / "all")


@pytest.mark.slow
@pytest.mark.parametrize("name", decoders.CONFIGS)
def test_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    impls = ["dense", "shared", *(["flex_tree", "gathered"] if name == "qwen3" else [])]
    given = ["--device", "cpu", "--tiny", "--models", name, "--cases", "2", "--repeats", "1", "--layers", "1", "--out", str(out)]
    assert step.main([*given, "--impls", *impls]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert case["gate"] == {one: [] for one in impls}
    assert case["I"] == pytest.approx(5.0)
    assert set(case["steps"]) == set(impls)
