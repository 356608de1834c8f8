from xml.etree import ElementTree

from gtpo_megatron import batch
from tools.make_pictures import COLOURS, IMAGES, STAGES, stages_svg


def test_the_committed_picture_is_what_the_tool_draws():
    assert (IMAGES / "stages.svg").read_text(encoding="utf-8") == stages_svg()


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
