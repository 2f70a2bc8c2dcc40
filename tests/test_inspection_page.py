"""The page of `inspect html` in headless Chromium."""

import pytest

from jaxprefill.inspection.page import render
from jaxprefill.inspection.records import Chip, Inspected
from jaxprefill.inspection.summary import analyse, summarise
from tests.test_inspection import GPU
from tests.test_page import artifacts, browser, pytestmark  # noqa: F401

CHIP = Chip("gpu", "NVIDIA H200", 4.44e12, {"bf16": 790e12, "f32": 67e12}, "measured")


@pytest.fixture
def page(tmp_path):
    analyses = [
        analyse(
            Inspected(
                name=f"prefill {tokens}x16x8192 </script>",
                chip=CHIP,
                read_text=lambda stage: GPU,
                temp_bytes=tokens,
                code_bytes=1,
                measured_s=1e-6,
            )
        )
        for tokens in (32, 1024, 128)
    ]
    path = tmp_path / "out.html"
    path.write_text(render(CHIP, [summarise(each) for each in analyses], analyses[0]))
    return path


def test_a_person_sees_roofline_memory_layer_and_sorted_table(page, browser, artifacts):  # noqa: F811
    browser.open(page.as_uri())
    browser.until("document.querySelectorAll('#table tbody tr').length === 3")
    assert browser.script("document.querySelectorAll('#roofline circle').length") == 6
    assert browser.script("document.querySelectorAll('#memory rect').length") == 6
    scopes = "[...document.querySelectorAll('#layer text')].map(x => x.textContent)"
    assert {"mlp.gate_up", "attention.qkv", "final_norm"} <= set(browser.script(scopes))
    first = "[...document.querySelectorAll('#table tbody tr')].map(x => x.cells[8].textContent)"
    browser.click("#table th:nth-child(9)")
    assert browser.script(first) == ["1.02 kB", "128 B", "32 B"]
    browser.click("#table th:nth-child(9)")
    assert browser.script(first) == ["32 B", "128 B", "1.02 kB"]
    browser.screenshot(artifacts / "inspect.png")
    assert browser.complaints() == []
