"""The Python surface on the fake model."""

import json
from pathlib import Path
from threading import Thread

import pytest

from leadline import LLM, SamplingParams
from leadline.config.model import read_config
from leadline.engine.core import EngineCore
from leadline.errors import (
    CapacityError,
    CheckpointError,
    EngineError,
    ImageError,
    PromptError,
    RequestError,
    SamplingError,
)
from leadline.llm import resolve_model
from tests.support.fake_llm import fake_llm
from tests.support.scripted_llm import scripted_llm

pytestmark = pytest.mark.unit

FIVE = SamplingParams(max_tokens=5, seed=1)


def test_generate_takes_texts_and_ids_one_or_several():
    llm = fake_llm("abc")
    (by_text,) = llm.generate("xa", FIVE)
    ids = llm.tokenizer.encode("xa", add_bos=True)
    assert by_text.prompt == "xa"
    assert by_text.prompt_token_ids == ids
    assert by_text.outputs[0].text == "bcabc"
    assert by_text.outputs[0].finish_reason == "length"
    assert llm.tokenizer.decode(by_text.outputs[0].token_ids) == "bcabc"
    (by_ids,) = llm.generate(ids, FIVE)
    assert (by_ids.prompt, by_ids.outputs[0].text) == (None, "bcabc")
    several = llm.generate(["xb", ids], [SamplingParams(max_tokens=1), FIVE])
    assert [output.outputs[0].text for output in several] == ["c", "bcabc"]


def test_an_empty_text_is_bos_and_empty_ids_are_refused():
    llm = fake_llm("abc")
    assert llm.generate("", FIVE)[0].prompt_token_ids == llm.tokenizer.encode("", add_bos=True)
    assert llm.score("")[0].prompt_logprobs == [None]
    for ask in (llm.generate, llm.score):
        for nothing in ([], [[]], ["a", []]):
            with pytest.raises(PromptError, match="at least one"):
                ask(nothing)


def test_generate_n_and_logprobs():
    (output,) = fake_llm("abc").generate("x", SamplingParams(n=2, max_tokens=3, logprobs=2))
    assert [answer.index for answer in output.outputs] == [0, 1]
    for answer in output.outputs:
        assert len(answer.logprobs) == 3
        for token_id, entries in zip(answer.token_ids, answer.logprobs, strict=True):
            assert entries[token_id].rank == 1
            assert len(entries) == 2


def test_stream_joins_to_generate_and_can_be_left():
    llm = fake_llm("abc", speculate=True, max_num_seqs=1)
    assert "".join(delta.text for delta in llm.stream("x", FIVE)) == "abcab"
    stream = llm.stream("x", FIVE)
    next(stream)
    stream.close()
    (output,) = llm.generate("x", FIVE)
    assert (output.outputs[0].num_drafted, output.outputs[0].num_accepted) == (3, 3)


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("name", ["_propose", "_draw", "_take", "_delta"])
@pytest.mark.parametrize("calls", [1, 2])
def test_an_interrupted_step_ends_its_sequences_and_nothing_else(monkeypatch, name, speculate, calls):
    """Ctrl-C somewhere in a step that two generations share. The other one must not go on with a token missing."""
    llm = fake_llm("abcdefgh", speculate=speculate)
    first, second, late = (llm.stream("h", SamplingParams(max_tokens=30)) for _ in range(3))
    next(first), next(second)
    whole, left = getattr(EngineCore, name), [calls]

    def interrupted(*args):
        result = whole(*args)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(EngineCore, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(first)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="interrupted"):
        list(second)
    assert not llm.engine.has_work
    assert llm.cache.pages.num_free == llm.cache.pages.num_pages
    assert "".join(delta.text for delta in late) == "abcdefghabcdefghabcdefghabcdef"


@pytest.mark.parametrize("name", ["_propose", "_draw", "_take", "_delta"])
def test_a_lost_generation_collected_in_a_step_harms_no_other(monkeypatch, name):
    """The collector may close a generator anywhere, in the middle of a step as well."""
    llm = fake_llm("abcdefgh", speculate=True)
    lost = [llm.stream("h", SamplingParams(max_tokens=30))]
    next(lost[0])
    whole = getattr(EngineCore, name)

    def collecting(*args):
        lost.clear()
        return whole(*args)

    monkeypatch.setattr(EngineCore, name, collecting)
    (output,) = llm.generate("h", SamplingParams(max_tokens=20))
    assert (output.outputs[0].text, output.outputs[0].error) == ("abcdefghabcdefghabcd", None)
    assert lost == []
    assert (llm.cache.num_free_slots, llm.engine.has_work, llm._inbox) == (llm.cache.max_sequences, False, {})


def test_a_call_from_inside_a_call_is_refused():
    llm = fake_llm("abcdefgh")
    with pytest.raises(RequestError, match="from inside another one"):
        llm.score("abc", progress=lambda done, total: llm.generate("x"))
    with pytest.raises(RequestError, match="from inside another one"):
        llm.score("abc", progress=lambda done, total: llm.score("x"))
    assert llm.generate("h", FIVE)[0].outputs[0].text == "abcde"
    assert llm.cache.num_free_slots == llm.cache.max_sequences


def test_threads_share_one_model():
    llm = fake_llm("abcdefgh", max_num_seqs=3, speculate=True)
    texts: list[str] = []

    def work() -> None:
        for _ in range(10):
            texts.append(llm.generate("h", SamplingParams(max_tokens=20))[0].outputs[0].text)
            llm.score("abc")
            next(llm.stream("h", SamplingParams(max_tokens=20)))  # and left

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert texts == ["abcdefghabcdefghabcd"] * 20
    assert (llm.cache.num_free_slots, llm.engine.has_work) == (3, False)


def test_chat_one_and_several_conversations():
    llm = fake_llm("abc")
    messages = [{"role": "user", "content": "x"}]
    (answer,) = llm.chat(messages, FIVE)
    assert answer.outputs[0].text == "abcab"
    assert answer.prompt.endswith("User: x\n\nAssistant:")
    assert len(llm.chat([messages, messages], FIVE)) == 2
    assert "".join(part.text for piece in llm.stream_chat(messages, FIVE) for part in piece.parts) == "abcab"
    with pytest.raises(PromptError):
        llm.chat([], FIVE)
    with pytest.raises(PromptError, match="thinking"):
        llm.chat(messages, FIVE, thinking=True)


def test_chat_in_the_released_format_keeps_a_call_that_was_cut():
    config = read_config(Path(__file__).parent.parent / "golden" / "released_config.json")
    call = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">x'
    llm = scripted_llm(config, f"why</think>text\n\n{call}")
    tool = {"type": "function", "function": {"name": "f"}}
    (output,) = llm.chat([{"role": "user", "content": "x"}], SamplingParams(temperature=0, max_tokens=99), tools=[tool])
    answer = output.outputs[0]
    assert (answer.reasoning, answer.text) == ("why", "text")
    (call,) = answer.tool_calls
    assert json.loads(call)["function"] == {"name": "f", "arguments": '{"a": "x'}


def test_an_answer_that_ends_at_once():
    (output,) = fake_llm("").generate("x")
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")
    assert output.outputs[0].token_ids == [1]


def test_score():
    llm = fake_llm("abc")
    scored, other = llm.score(["abcabc", [0]], top=1)
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids) == 7
    last = scored.prompt_token_ids[-1]
    assert scored.prompt_logprobs[-1][last].logprob == pytest.approx(0, abs=1e-6)  # logit 50 against zeros
    assert other.prompt_logprobs == [None]


def test_an_answer_that_ends_inside_a_character_and_a_stop_string():
    """What a stop string held back comes first, then the mark for the broken character."""
    llm = fake_llm("aé")
    (output,) = llm.generate("x", SamplingParams(max_tokens=2, stop="az"))
    assert output.outputs[0].text == "a\ufffd"
    (output,) = llm.generate("x", SamplingParams(max_tokens=9, stop="a\u00e9"))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("", "aé")


def test_refusals():
    llm = fake_llm("abc", max_model_len=10)
    with pytest.raises(PromptError, match="at most 10 tokens"):
        llm.score("x" * 10)
    with pytest.raises(PromptError, match="at most 9 tokens"):
        llm.generate("x" * 10)
    with pytest.raises(SamplingError, match="sampling_params: expected one"):
        llm.generate(["x", "y"], [FIVE])
    with pytest.raises(PromptError, match="at least one token"):
        llm.generate([[]])
    with pytest.raises(PromptError, match="images: expected one list"):
        llm.generate("x", images=[[], []])
    with pytest.raises(PromptError, match="does not read images"):
        llm.generate("x", images=[["a.png"]])
    with pytest.raises(PromptError, match="got the image token 3 in the prompt"):
        llm.generate([3])
    with pytest.raises(ImageError, match="does not read images"):
        llm.chat([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
    with pytest.raises(SamplingError, match="stop_token_ids"):
        llm.generate("x", SamplingParams(stop_token_ids=[260]))


@pytest.mark.parametrize("word", ["/no/such/folder", "./folder", "name", "a/b/c", "../x", "", "n" * 5000, __file__])
def test_unknown_model_words(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected a checkpoint folder or a hub id|no such"):
        LLM(word) if word else resolve_model(tmp_path / "missing")


def test_a_hub_that_does_not_answer(monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise OSError("offline\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=r"the hub says: offline$"):
        resolve_model("owner/name")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: f"/cache/{name}")
    assert str(resolve_model("owner/name")) == "/cache/owner/name"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", -1),
        ("max_num_seqs", 2.5),
        ("max_snapshots", -1),
        ("host_cache_bytes", -1),
        ("max_cache_tokens", -5),
        ("max_waiting", 0),
        ("max_model_len", 0),
        ("max_model_len", 10**9),
        ("max_num_seqs", None),
        ("speculate", "x"),
    ],
)
def test_bad_options_are_refused_by_name(option, value):
    llm = fake_llm("ab")
    with pytest.raises(RequestError, match=option):
        LLM.from_parts(llm.model, llm.tokenizer, **{"max_snapshots": 0, option: value})


def test_score_refuses_what_the_cache_cannot_hold():
    llm = fake_llm("ab", max_cache_tokens=128)
    assert len(llm.score("x" * 127)[0].prompt_logprobs) == 128
    with pytest.raises(CapacityError, match="129 tokens, 128 fit in the cache; raise max_cache_tokens"):
        llm.score(["x", "x" * 128])
    assert llm.model.steps == [[128]]


def test_score_refuses_the_image_token():
    with pytest.raises(PromptError, match="got the image token 3"):
        fake_llm("ab").score([5, 3])


def test_score_refuses_a_negative_top():
    with pytest.raises(RequestError, match="top"):
        fake_llm("ab").score("ab", top=-1)


@pytest.mark.parametrize(
    "prompts", [None, 5, b"abc", {"a": 1}, ["a", 3], [4, "a"], ["a", None], [b"abc"], [[1, "a"]]], ids=str
)
@pytest.mark.parametrize("method", ["generate", "stream", "score"])
def test_prompts_of_a_wrong_type(method, prompts):
    with pytest.raises(PromptError, match=r"^prompt.*: expected .*, got "):
        getattr(fake_llm("ab"), method)(prompts)


@pytest.mark.parametrize(
    "params", [5, "x", {"temperature": 0}, [{"temperature": 0}], [None], [], [FIVE, FIVE]], ids=str
)
def test_params_of_a_wrong_type_or_number(params):
    messages = [{"role": "user", "content": "x"}]
    for ask in (lambda llm: llm.generate("x", params), lambda llm: llm.chat(messages, params)):
        with pytest.raises(SamplingError, match=r"^sampling_params: expected one"):
            ask(fake_llm("ab"))


@pytest.mark.parametrize("messages", [None, 5, "text", b"x", {"role": "user"}, [5], [None], [[5]], [[], 5]], ids=str)
def test_messages_of_a_wrong_type(messages):
    for ask in (fake_llm("ab").chat, fake_llm("ab").stream_chat):
        with pytest.raises(PromptError, match=r"^messages: expected "):
            ask(messages)


@pytest.mark.parametrize(
    ("option", "value"), [("thinking", "yes"), ("tools", 5), ("tools", "x"), ("effort", 2.5), ("effort", [1])]
)
def test_chat_options_of_a_wrong_type(option, value):
    with pytest.raises(PromptError, match=f"^{option}: expected "):
        fake_llm("ab").chat([{"role": "user", "content": "x"}], **{option: value})


@pytest.mark.parametrize("images", [5, "a.png", ["a.png"], [5]], ids=str)
def test_images_of_a_wrong_type(images):
    with pytest.raises(PromptError, match="images: expected one list for each of 1 prompts"):
        fake_llm("ab").generate("x", images=images)


def test_a_model_of_a_wrong_type():
    with pytest.raises(CheckpointError, match="model: expected a folder, a hub id or None, got 5"):
        LLM(5)
