"""Requests: what becomes of each field, and which are refused by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from degarble.harness.chat.special_tokens import ASSISTANT, BOS, END_THINK, EOS, THINK, USER
from degarble.harness.inference.model import open_model
from degarble.harness.serve.messages import ApiError
from degarble.harness.serve.requests import (
    RequestFields,
    read_chat,
    read_completion,
    read_object,
    shown,
)
from degarble.harness.serve.served_model import ServedModel
from degarble.suites.chat.talk_cases import ENCODER, TOOL, TOOLS_TEXT
from degarble.suites.serve.serving_cases import BOUNDS
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Requests: what becomes of each field, and which are refused by name.


@pytest.fixture(scope="module", params=["v4", "v32"])
def desk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    path: Path = write_speaker(tmp_path_factory.mktemp("asked") / "model", request.param)
    with open_model(path) as model:
        yield ServedModel(model, "words", BOUNDS)


def complete(desk: ServedModel, **fields: Any) -> Any:
    return read_completion({"model": "words", "prompt": "w7 w8"} | fields, desk)


def chat(desk: ServedModel, *messages: dict[str, Any], **fields: Any) -> Any:
    said = list(messages) or [{"role": "user", "content": "w7"}]
    return read_chat({"model": "words", "messages": said} | fields, desk)


def test_openai_s_defaults_hold(desk: ServedModel) -> None:
    asked = complete(desk)
    (ask,) = asked.sequences
    assert (ask.sampling.temperature, ask.sampling.top_p) == (1.0, 1.0)
    assert (ask.limits.new_tokens, ask.limits.stops, ask.top) == (16, (), None)
    assert ask.prompt == (0, 7, 8)
    assert ask.silent_begin
    assert not asked.stream
    assert complete(desk).sequences[0].sampling.seed != ask.sampling.seed  # drawn


def test_every_field_arrives(desk: ServedModel) -> None:
    asked = complete(
        desk, prompt=["w9", [7, 8]], n=2, temperature=0.5, top_p=0.25, seed=-1, max_tokens=3,
        stop=["w1", "w2"], logprobs=2, echo=True, stream=True,
        stream_options={"include_usage": True}, user="me", best_of=2, suffix=None,
        presence_penalty=0, frequency_penalty=0.0, logit_bias={},
    )  # fmt: skip
    assert [a.prompt for a in asked.sequences] == [(0, 9), (0, 9), (7, 8), (7, 8)]
    assert [a.silent_begin for a in asked.sequences] == [True, True, False, False]
    assert [a.sampling.seed for a in asked.sequences] == [2**63 - 1, 0] * 2  # choice n has seed + n
    assert {(a.limits.new_tokens, a.limits.stops, a.top) for a in asked.sequences} == {
        (3, ("w1", "w2"), 2)
    }
    assert all(a.scores_prompt for a in asked.sequences)
    assert (asked.stream, asked.usage_wanted, asked.echo, asked.prompt_tokens) == (
        True, True, True, 4,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "other"}, "model"),
        ({"model": None}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "  \n"}, "prompt"),
        ({"prompt": "w7 \ud800"}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [64]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1, "w7"]]}, "prompt"),
        ({"prompt": ["w7"] * 65}, "prompt"),
        ({"prompt": "w7 " * 300}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 41}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e999}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"suffix": "w"}, "suffix"),
        ({"min_p": 0.1}, "min_p"),
        ({"patch": "x.py"}, "patch"),
        ({"top_k\u202e": 1}, "top_k\\u202e"),
    ],
)
def test_completions_are_refused_by_name(
    desk: ServedModel, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        complete(desk, **fields)
    assert caught.value.param == param
    assert caught.value.status == (404 if fields.get("model") else 400)
    assert len(caught.value.message) < 600


def test_what_exceeds_the_context_is_refused_and_what_is_unsaid_is_cut(desk: ServedModel) -> None:
    assert desk.context > BOUNDS.prompt_tokens

    class Short(ServedModel):
        @property
        def context(self) -> int:
            return 10

    short = Short(desk.model, "words", BOUNDS)
    assert complete(short, prompt="w7 w8").sequences[0].limits.new_tokens == 7
    with pytest.raises(ApiError) as caught:
        complete(short, prompt="w7 w8", max_tokens=8)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ApiError):
        complete(short, prompt="w7 " * 9)


def test_a_prompt_alone_may_be_requested_with_echo(desk: ServedModel) -> None:
    asked = complete(desk, max_tokens=0, echo=True, logprobs=1)
    assert asked.sequences[0].limits.new_tokens == 0


def text_of(desk: ServedModel, asked: Any) -> str:
    return desk.tokenizer.decode(asked.sequences[0].prompt).replace(" ", "")


def test_a_chat_is_encoded_as_the_model_knows_it(desk: ServedModel) -> None:
    asked = chat(desk, {"role": "system", "content": "w9"}, {"role": "user", "content": "w7"})
    assert text_of(desk, asked) == f"{BOS}w9{USER}w7{ASSISTANT}{END_THINK}"
    assert asked.sequences[0].limits.new_tokens == BOUNDS.new_tokens
    part = {"role": "user", "content": [{"type": "text", "text": "w7"}]}
    assert text_of(desk, chat(desk, part)) == f"{BOS}{USER}w7{ASSISTANT}{END_THINK}"
    thinking = chat(desk, thinking={"type": "enabled"})
    assert text_of(desk, thinking) == f"{BOS}{USER}w7{ASSISTANT}{THINK}"
    told = chat(
        desk, {"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"},
        {"role": "user", "content": "w9"}, max_completion_tokens=5, logprobs=True, top_logprobs=2,
        reasoning_effort="none", response_format={"type": "text"}, tool_choice="none",
    )  # fmt: skip
    assert f"w8{EOS}{USER}w9" in text_of(desk, told)
    assert (told.sequences[0].limits.new_tokens, told.sequences[0].top) == (5, 2)


def test_tools_stand_in_the_system_message(desk: ServedModel) -> None:
    with pytest.raises(ApiError, match="wording of tools"):
        chat(desk, tools=[TOOL])
    chat(desk, tools=[TOOL], tool_choice="none")
    root = desk.model.checkpoint.root
    encoders = [root / "encoding_dsv4.py", root / "encoding_dsv32.py"]
    for path in encoders:
        path.write_text(ENCODER)
    seen: list[str] = []
    tokenizer = desk.tokenizer

    class Seeing:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode(self, text: str, **_: Any) -> list[int]:
            seen.append(text)
            return [1]

    desk.generator.tokenizer = Seeing()  # type: ignore[assignment]
    try:
        chat(desk, tools=[TOOL])
        chat(desk, {"role": "system", "content": "w9"}, {"role": "user", "content": "w7"},
             tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)  # fmt: skip
    finally:
        desk.generator.tokenizer = tokenizer
        for path in encoders:
            path.unlink()
    for said in ("", "w9"):
        beginning = f"{BOS}{said}\n\n{TOOLS_TEXT}{USER}w7"
        assert any(text.startswith(beginning) for text in seen)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["w7", "\ud800", "user", "tool", "text", "enabled", "auto", "{"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
NAMES = (
    "prompt", "messages", "max_tokens", "temperature", "n", "stream", "stream_options", "stop",
    "seed", "logprobs", "top_logprobs", "tools", "tool_choice", "thinking", "reasoning_effort",
    "response_format", "logit_bias", "echo",
)  # fmt: skip


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3), st.booleans())
def test_whatever_a_request_holds_it_is_read_or_refused(
    desk: ServedModel, fields: dict[str, Any], chats: bool
) -> None:
    usual: dict[str, Any] = {"messages": [USER_SAYS]} if chats else {"prompt": "w7"}
    try:
        request = (read_chat if chats else read_completion)(
            usual | fields | {"model": "words"}, desk
        )
    except ApiError as error:
        assert error.status == 400  # noqa: PT017  either will do
        assert len(error.message) < 1000  # noqa: PT017  as above
    else:
        assert request.sequences


USER_SAYS = {"role": "user", "content": "w7"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "w7"}, "messages"),
        ({"messages": ["w7"]}, "messages[0]"),
        ({"messages": [{"content": "w7"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "w7"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "w7"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
        ({"messages": [USER_SAYS | {"wo_eos": True}]}, "messages[0].wo_eos"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 1}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]},
         "messages[0].content"),
        ({"messages": [USER_SAYS, {"role": "assistant", "content": "w8"}]}, "messages"),
        ({"messages": [{"role": "system", "content": "w8"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "w8"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}, USER_SAYS]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": {}}]}, USER_SAYS]},
         "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}, USER_SAYS]},
         "messages[0].tool_calls[0].function.name"),
        ({"messages": [{"role": "user", "content": "w7 \ud800"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"reasoning_effort": "high", "thinking": {"type": "disabled"}}, "reasoning_effort"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"functions": []}, "functions"),
        ({"prompt": "w7"}, "prompt"),
    ],
)  # fmt: skip
def test_chats_are_refused_by_name(desk: ServedModel, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat({"model": "words", "messages": [USER_SAYS]} | fields, desk)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_arguments_nested_deeply_are_no_crash(desk: ServedModel) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": '{"a": ' + "[" * 90_000}}
    result = {"role": "tool", "tool_call_id": "a", "content": "w7"}
    with pytest.raises(ApiError) as caught:
        chat(desk, {"role": "assistant", "tool_calls": [call]}, result)
    assert caught.value.param == "messages"


def test_a_tokenizer_without_marks_has_no_chats(desk: ServedModel) -> None:
    class Bare(ServedModel):
        pass

    bare = Bare(desk.model, "words", BOUNDS)

    class Unmarked(type(bare.generator)):  # type: ignore[misc]
        knows_chat = False

    bare.generator.__class__ = Unmarked
    with pytest.raises(ApiError) as caught:
        chat(bare)
    assert caught.value.code == "chat_unavailable"
    assert "/v1/completions" in caught.value.message


# --------------------------------------------------------------------------------------------------
# Bodies: strict JSON, fields by name, and nothing that goes unheard.


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe{}", "no UTF-8 at byte 0"),
        (b"[]", "a JSON object"),
        (b'"text"', "a JSON object"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": {"b": 1, "b": 2}}', "twice"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"a": 1} x', "no JSON"),
    ],
    ids=range(11),
)
def test_a_body_that_is_no_object_is_refused(body: bytes, told: str) -> None:
    with pytest.raises(ApiError, match=told) as caught:
        read_object(body)
    assert caught.value.status == 400
    assert caught.value.document()["error"]["code"] == "invalid_json"
    assert len(caught.value.message) < 300


def test_a_good_body_is_read() -> None:
    assert read_object('{"a": ["\\ud800", "ß", 1e3]}'.encode()) == {"a": ["\ud800", "ß", 1000.0]}


@pytest.mark.parametrize(
    "value", [True, "1", [], {}, math.inf, -math.inf, math.nan, -0.1, 2.1, 10**400]
)
def test_numbers_out_of_their_range_are_refused(value: object) -> None:
    with pytest.raises(ApiError, match=r"^temperature: ") as caught:
        RequestFields({"temperature": value}).number("temperature", 1.0, 0, 2)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("value", [True, 1.0, "1", -1, 0, 11, 10**400])
def test_whole_numbers_out_of_their_range_are_refused(value: object) -> None:
    with pytest.raises(ApiError, match=r"^max_tokens: "):
        RequestFields({"max_tokens": value}).integer("max_tokens", 1, 10)


def test_fields_are_taken_once_and_the_rest_is_refused() -> None:
    fields = RequestFields({"n": 3, "t": 0, "stop": "a", "gone": None, "on": True})
    assert fields.integer("n", 1, 4) == 3
    assert fields.number("t", 1.0, 0, 2) == 0.0
    assert fields.texts("stop", 4) == ("a",)
    assert fields.flag("on") is True
    fields.end()  # null is absent
    with pytest.raises(ApiError, match=r"^top_k: is not supported") as caught:
        RequestFields({"top_k": 1}).end()
    assert caught.value.code == "unsupported_parameter"
    inner = RequestFields({"a": {"b": 1}}).inner("a")
    assert inner is not None
    with pytest.raises(ApiError, match=r"^a\.b: "):
        inner.end()


@pytest.mark.parametrize("value", [["a", 1], ["a"] * 5, "", ["a", ""], 7, {"a": 1}])
def test_stops_that_are_no_texts_are_refused(value: object) -> None:
    with pytest.raises(ApiError, match=r"^stop: "):
        RequestFields({"stop": value}).texts("stop", 4)


def test_a_value_without_effect_passes_and_another_is_refused_by_name() -> None:
    RequestFields({"best_of": 1, "penalty": 0.0}).require_one_of("best_of", 1)
    RequestFields({"penalty": 0.0}).require_one_of("penalty", 0, 0.0)
    with pytest.raises(ApiError, match=r"penalty: 0\.5 is not supported; leave it out or give 0"):
        RequestFields({"penalty": 0.5}).require_one_of("penalty", 0, 0.0)
    with pytest.raises(ApiError, match="best_of: True"):
        RequestFields({"best_of": True}).require_one_of("best_of", 1)


def test_values_are_shown_short_and_printable() -> None:
    assert shown("a\n\u202e\ud800") == "'a\\n\\u202e\\ud800'"
    assert len(shown("x" * 1000)) < 90
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "a value nested deeply"
