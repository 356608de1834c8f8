import re
from xml.etree import ElementTree

import pytest

from gtpo_megatron import batch
from tools.make_pictures import COLOURS, IMAGES, STAGES, stages_svg
from tools.maps import HEIGHT, IMPORTS, PROCESSES, ROOMS, processes_svg, rooms_svg


def test_the_committed_pictures_are_what_the_tool_draws():
    for name, drawn in (("stages", stages_svg), ("processes", processes_svg), ("rooms", rooms_svg)):
        assert (IMAGES / f"{name}.svg").read_text(encoding="utf-8") == drawn()


def test_the_rooms_are_those_of_the_package_and_each_arrow_is_an_import():
    package = IMAGES.parents[1] / "gtpo_megatron"
    there = {each.stem for each in package.iterdir() if each.is_dir() or each.suffix == ".py"}
    small = {
        "__init__",
        "__pycache__",
        "py",
        "atomic_file",
        "branches",
        "cycle_collector",
        "machine_memory",
        "outcomes",
        "sentence",
    }
    small |= {"sft"}  # as train, with fewer rooms below it
    assert {box.name for box in ROOMS} == there - small
    for start, end in IMPORTS:
        files = (package / start).rglob("*.py") if (package / start).is_dir() else [package / f"{start}.py"]
        pattern = re.compile(rf"(from|import) gtpo_megatron\.{end}\b")
        assert any(pattern.search(file.read_text(encoding="utf-8")) for file in files), f"{start} -> {end}"


@pytest.mark.parametrize("boxes", [PROCESSES, ROOMS], ids=["processes", "rooms"])
def test_no_box_of_a_map_is_over_another(boxes):
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            (x0, y0), (x1, y1) = one.centre, other.centre
            assert abs(x0 - x1) >= (one.width + other.width) / 2 or abs(y0 - y1) >= HEIGHT, (one.name, other.name)


def test_nine_boxes_within_the_picture_and_none_over_another():
    root = ElementTree.fromstring(stages_svg())
    _, _, width, height = (float(number) for number in root.attrib["viewBox"].split())
    boxes = [each.attrib for each in root.iter("{http://www.w3.org/2000/svg}rect") if each.attrib["class"] != "page"]
    corners = [[float(box[key]) for key in ("x", "y", "width", "height")] for box in boxes]
    assert len(boxes) == len(STAGES) + len(COLOURS)
    assert all(0 < x < x + w < width and 0 < y < y + h < height for x, y, w, h in corners)
    apart = [
        a[0] + a[2] <= b[0] or b[0] + b[2] <= a[0] or a[1] + a[3] <= b[1] or b[1] + b[3] <= a[1]
        for n, a in enumerate(corners)
        for b in corners[:n]
    ]
    assert all(apart)


def test_the_records_are_those_of_the_code():
    records = [stage.leaves for stage in STAGES if stage.leaves.endswith("Batch")]
    assert len(records) == 5
    assert all(hasattr(batch, record) for record in records)
