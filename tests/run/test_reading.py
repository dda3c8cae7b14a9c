from __future__ import annotations

import numpy as np

from workbench.run.reading import Reading, compare_readings


def reading(lane: str, text: str | None, ids: list[int], **sampling: object) -> Reading:
    tokens = {identity: bytes([identity]) for identity in ids}
    return Reading(lane, text, np.array(ids, "<i4"), f"template of {lane}", "0", sampling, token_bytes=tokens)


def test_the_first_difference_is_found_in_the_text_the_tokens_and_the_sampling_defaults() -> None:
    ours = reading("a", "<s>system\nBe brief.", [65, 66, 67], temperature=1.0, top_k=50)
    theirs = reading("b", "<s>system\nBe kind.", [65, 67, 67], temperature=0.8, top_k=50)
    found = compare_readings(ours, theirs)
    assert found["text"] == {"character": 13, "before": "<s>system\nBe ", "texts": ["brief.", "kind."]}
    assert found["token"]["index"] == 1
    assert [side["text"] for side in found["token"]["tokens"]] == ["B", "C"]
    assert found["sampling"] == {"temperature": [1.0, 0.8]}


def test_equal_prompts_have_no_difference_and_an_unknown_text_is_not_called_another() -> None:
    ours = reading("a", "x", [65])
    assert compare_readings(ours, reading("b", "x", [65])) == {"text": None, "token": None, "sampling": {}}
    assert compare_readings(ours, reading("b", None, [65]))["text"] is None


def test_a_prompt_that_only_ends_earlier_differs_where_it_ends() -> None:
    found = compare_readings(reading("a", "xy", [65, 66]), reading("b", "x", [65]))
    assert found["text"]["character"] == 1
    assert found["token"]["tokens"][1] is None
