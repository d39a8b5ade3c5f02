"""Dumps: what is written, that it can be read, and that nothing is overwritten."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest
import torch

from sp_compile import backend
from sp_compile.debug import dump, readable
from sp_compile.options import Options
from tests.debug.models import Model, compiled, rows

pytestmark = pytest.mark.filterwarnings("ignore:shared_prefix")

PASSES = [one.name for one in backend.pipeline(Options())]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def expected() -> list[str]:
    ends = ("after.py", "before.py", "diff")
    return ["00_captured.py", *(f"{n:02}_{name}.{end}" for n, name in enumerate(PASSES, 1) for end in ends), "final.py"]


def read(folder: Path, name: str) -> str:
    (found,) = folder.glob(name)
    return found.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one region leaves in a folder that was not there."""
    torch._dynamo.reset()
    parent = tmp_path_factory.mktemp("dump") / "new" / "folder"
    compiled(Model(), dump=parent)(rows())
    (folder,) = parent.iterdir()
    return folder


def test_last_pass_is_the_one_whose_result_is_final() -> None:
    assert PASSES[-1] == dump.LAST


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compiled(Model())(rows())
    assert names(tmp_path) == []


def test_files_are_numbered_and_are_python(dumped: Path) -> None:
    assert dumped.name.startswith("region_")
    assert names(dumped) == expected()
    for path in dumped.glob("*.py"):
        compile(path.read_text(encoding="utf-8"), path.name, "exec")


def test_each_pass_begins_with_what_the_one_before_left(dumped: Path) -> None:
    latest = read(dumped, "00_captured.py")
    for number in range(1, len(PASSES) + 1):
        assert read(dumped, f"{number:02}_*.before.py") == latest
        latest = read(dumped, f"{number:02}_*.after.py")
    assert read(dumped, "final.py") == latest


def test_shapes_are_those_of_the_graph_and_no_folder_is_named(dumped: Path) -> None:
    assert ': "f32[B, L, 48]" = torch._C._nn.linear(' in read(dumped, "00_captured.py")
    packed = read(dumped, "02_share_prefixes.after.py")
    assert ': "f32[1, T, 48]" = torch._C._nn.linear(' in packed
    assert 'shared_attention: "f32[1, 2, T, 8]" = sp_compile_passes_markers_shared_attention(' in packed
    assert '    forest_index: "i64[B, L]",\n' in packed
    for path in dumped.iterdir():
        text = path.read_text(encoding="utf-8")
        assert "shapes unknown" not in text
        assert str(Path(__file__).parent) not in text
        assert str(dumped.parent) not in text
    assert "# models.py:" in packed


def test_difference_shows_what_the_pass_did(dumped: Path) -> None:
    changes = read(dumped, "03_add_forest_masks.diff").splitlines()
    assert changes[:2] == ["--- 03_add_forest_masks.before.py", "+++ 03_add_forest_masks.after.py"]
    removed = [line for line in changes[2:] if line.startswith("-")]
    added = [line for line in changes[2:] if line.startswith("+")]
    assert len(removed) == 1
    assert "shared_attention(" in removed[0]
    assert len(added) == 2
    assert 'forest_end: "i64[T]"' in added[0]
    assert "torch.ops.sp_compile.attention.default(" in added[1]


def test_pass_that_is_switched_off_writes_nothing(tmp_path: Path) -> None:
    compiled(Model(), dump=tmp_path, disable=["sink_unpacking"])(rows())
    assert names(tmp_path / "region_00") == [name for name in expected() if "sink_unpacking" not in name]


def test_files_of_an_earlier_process_are_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "region_00"
    folder.mkdir()
    (folder / "07_gone.diff").write_text("old")
    (folder / "notes.txt").write_text("mine")
    compiled(Model(), dump=tmp_path)(rows())
    assert names(folder) == [*expected(), "notes.txt"]


def test_regions_do_not_overwrite_each_other(tmp_path: Path) -> None:
    first, second = compiled(Model(), dump=tmp_path), compiled(Model(graph_break=True), dump=tmp_path)
    first(rows())
    text = read(tmp_path / "region_00", "final.py")
    second(rows())  # its second graph is refused before any pass
    assert len(names(tmp_path)) == 2
    assert all(names(folder) == expected() for folder in tmp_path.iterdir())
    assert read(tmp_path / "region_00", "final.py") == text


def test_variants_of_one_region_do_not_overwrite_each_other(tmp_path: Path) -> None:
    from sp_compile import region

    captured: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, values: list[torch.Tensor], **_: object) -> object:
        backend.ensure_symbolic(module.graph, values)
        captured.append(module)
        for _ in range(2):
            region.compile_region(module, values, Options(dump=str(tmp_path)))
        return module.forward

    torch.compile(Model(), backend=keep)(rows())
    assert names(tmp_path) == ["region_00", "region_00_variant_1"]


def test_second_run_writes_the_same_text(dumped: Path, tmp_path: Path) -> None:
    compiled(Model(), dump=tmp_path)(rows())
    (folder,) = tmp_path.iterdir()
    assert names(folder) == names(dumped)
    for path in folder.iterdir():
        assert path.read_text().replace(folder.name, "") == (dumped / path.name).read_text().replace(dumped.name, "")


def test_graph_without_shapes_is_written_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("no\nshapes")

    monkeypatch.setattr(readable, "propagate", fail)
    compiled(Model(), dump=tmp_path)(rows())
    text = read(tmp_path / "region_00", "02_share_prefixes.after.py")
    assert text.startswith("# region_00\n# shapes unknown: ZeroDivisionError: no shapes\n")
    assert "f32[" not in text


def test_checkpointed_lines_name_no_folder(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Model()
    compiled(lambda ids: checkpoint(model, ids, use_reentrant=False), dump=tmp_path)(rows())
    text = read(tmp_path / "region_00", "final.py")
    assert "File: " not in text
    assert re.search(r"#.* models.py:\d+ in forward", text)
    assert str(Path(__file__).parent) not in text


def test_called_graphs_are_written() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body_0 = torch.fx.symbolic_trace(torch.nn.ReLU())

    graph = torch.fx.Graph()
    value = graph.placeholder("value")
    body = graph.get_attr("body_0")
    graph.output(graph.call_function(torch.utils.checkpoint.checkpoint, (body, value), {"use_reentrant": False}))
    module = torch.fx.GraphModule(Outer(), graph)
    (name, called), *others = readable._called(graph, module)
    assert (name, others) == ("body_0", [])
    assert "relu" in str(called)


def test_trace_gets_the_first_and_the_last_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep()
    log = logging.getLogger("torch.__trace")
    monkeypatch.setattr(log, "handlers", [handler])
    compiled(Model())(rows())
    ours = [r for r in records if "shared_prefix" in r.metadata.get("artifact", {}).get("name", "")]  # type: ignore[attr-defined]
    found = {r.metadata["artifact"]["name"]: r.payload for r in ours}  # type: ignore[attr-defined]
    assert ': "f32[B, L, 48]"' in found["shared_prefix_before"]
    assert "attention_chains" in found["shared_prefix_after"]
    assert len(ours) == 2
    assert all("frame_id" in r.metadata and r.metadata["artifact"]["encoding"] == "string" for r in ours)  # type: ignore[attr-defined]


def test_depyf_folder_gets_the_rewritten_graphs(tmp_path: Path) -> None:
    depyf = pytest.importorskip("depyf")
    model = compiled(Model())
    with pytest.warns(UserWarning, match="trying to debug"), depyf.prepare_debug(str(tmp_path)):
        model(rows())
    found = names(tmp_path)
    assert [name for name in found if name.startswith("shared_prefix.")] == [f"shared_prefix.region_00.{name}" for name in expected()]
    assert "full_code_for_forward_0.py" in found
    assert dump.depyf_folder() is None


def test_depyf_is_not_imported() -> None:
    if "depyf" not in sys.modules:
        assert dump.depyf_folder() is None
        assert "depyf" not in sys.modules
