"""The command line on the fake model: what it prints where, exit status, signals, start-up time."""

import itertools
import json
import os
import pty
import re
import select
import string
import subprocess
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import leadline
from leadline.cli import main as cli_main
from leadline.cli import options
from tests.support.fake_llm import fake_llm

pytestmark = pytest.mark.unit

START_SECONDS = 60  # for a subprocess that imports torch on a busy machine


def fake_open_llm(options, ring=""):
    given = asdict(options)
    del given["weights"]
    return fake_llm(ring, **given)


@pytest.fixture
def run(monkeypatch):
    """Runs a command line on a fake model; `loaded` tells with which options it was opened."""
    runner = CliRunner()

    def invoke(*args, ring="abc", stdin=None):
        invoke.loaded = []

        def fake_open(model, options):
            invoke.loaded.append((model, options))
            return fake_open_llm(options, ring)

        for command in ("generate", "chat"):
            monkeypatch.setattr(f"leadline.cli.{command}.open_llm", fake_open)
        return runner.invoke(cli_main.app, [str(arg) for arg in args], input=stdin)

    return invoke


def fails(run, capsys, monkeypatch, *args, **kwargs):
    """Exit status and stderr of `main()` for arguments that must fail."""
    monkeypatch.setattr(sys, "argv", ["leadline", *args])
    monkeypatch.setattr("leadline.cli.generate.open_llm", lambda model, options: fake_open_llm(options))
    with pytest.raises(SystemExit) as stopped:
        cli_main.main()
    return stopped.value.code, capsys.readouterr()


def test_generate_streams_to_stdout_and_counts_on_stderr(run):
    result = run("generate", "x", "-n", 7)
    assert result.exit_code == 0, result.output
    assert result.stdout == "abcabca\n"
    assert re.match(r"2 prompt tokens in .* s, 7 tokens in .* s, [\d.]+ tokens/s\n", result.stderr)


def test_generate_from_file_and_stdin(run, tmp_path):
    (tmp_path / "prompt").write_text("xb", encoding="utf-8")
    assert run("generate", "--file", tmp_path / "prompt", "-n", 2).stdout == "ca\n"
    assert run("generate", "-", "-n", 2, stdin="xa").stdout == "bc\n"


def test_generate_passes_every_option(run):
    result = run(
        *("generate", "x", "--model", "some/model", "--weights", "packed", "--prefill", "replay", "--speculate"),
        *(
            "--max-model-len",
            100,
            "--max-cache-tokens",
            500,
            "-t",
            0,
            "--top-p",
            0.5,
            "--top-k",
            3,
            "--min-p",
            0.1,
            "--seed",
            4,
            "--n",
            2,
        ),
        *("--stop", "zz", "--stop", "ca", "--stop-token-id", 9, "--include-stop", "--ignore-eos", "--min-tokens", 2),
        *("--json", "--logprobs", 1),
    )
    assert result.exit_code == 0, result.output
    wanted = options.ModelOptions(
        weights="packed", prefill="replay", speculate=True, max_model_len=100, max_cache_tokens=500
    )
    assert run.loaded == [("some/model", wanted)]
    document = json.loads(result.stdout)
    assert document["prompt"] == "x"
    assert [answer["text"] for answer in document["answers"]] == ["abca"] * 2
    assert document["answers"][0]["stop_reason"] == "ca"
    assert document["answers"][0]["logprobs"][0][0]["token"] == "a"
    assert document["statistics"]["drafts"] > 0


def test_json_is_one_document_and_several_answers_are_headed(run):
    assert json.loads(run("generate", "x", "-n", 3, "--json").stdout)["answers"][0]["text"] == "abc"
    assert run("generate", "x", "-n", 3, "--n", 2).stdout == "--- answer 1\nabc\n--- answer 2\nabc\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate"], "error: prompt: expected a text"),
        (["generate", "x", "--file", "y"], "error: prompt: expected a text"),
        (["generate", "--file", "/no/such/file"], "error: /no/such/file: expected readable UTF-8 text"),
        (["generate", "x", "-t", "-1"], "error: --temperature: expected"),
        (["generate", "x" * 50, "--max-model-len", "20"], "error: prompt: expected at most 19 tokens"),
        (["generate", "x", "--image", "/no/such.png"], "error: images: expected none"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_our_errors_are_one_line_and_status_1(run, capsys, monkeypatch, args, message):
    code, captured = fails(run, capsys, monkeypatch, *args)
    assert code == 1
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def number_options():
    """Every number option of every command, at values that mean nothing."""
    integers = {
        "generate x": {"--max-tokens": "-1", "--min-tokens": "-1", "--top-k": "-2", "--n": "0 -1", "--logprobs": "-1",
                       "--stop-token-id": "-1", "--max-model-len": "0 -1 999999999",
                       "--max-cache-tokens": "0 -1", "--seed": ""},
        "chat": {"--max-tokens": "-5", "--top-k": "-2", "--max-model-len": "0 -1", "--seed": "",
                 "--effort": "0 -1 999"},
        "serve": {"--port": "-1 65536", "--max-num-seqs": "0 -1", "--max-num-batched-tokens": "0 -1",
                  "--max-images": "-1", "--max-cache-tokens": "0 -1", "--max-snapshots": "-1", "--host-cache-mib": "-1",
                  "--max-waiting": "0 -1", "--max-body-mib": "0 -1", "--max-model-len": ""},
        "bench serve": {"--sessions": "0 -1", "--turns": "0 -1", "--shared-prefix": "-1", "--input-len": "0 -1 5:2",
                        "--output-len": "0 -1", "--max-concurrency": "0 -1", "--vocab-size": "0 -1", "--seed": ""},
        "plan": {"--context": "0 -1", "--batch": "0 -1", "--gpus": "0 -1"},
    }  # fmt: skip
    numbers = {
        "generate x": {"--temperature": "-1", "--top-p": "0 -1", "--min-p": "-1"},
        "chat": {"--temperature": "-1", "--top-p": "0 -1", "--min-p": "-1"},
        "serve": {"--request-timeout": "0 -1", "--drain-timeout": "-1"},
        "bench serve": {"--timeout": "0 -1", "--temperature": "-1", "--cancel": "-1"},
    }
    for kinds, always in ((integers, "nan inf 1.5 x"), (numbers, "nan inf -inf x")):
        for command, options_ in kinds.items():
            for option, values in options_.items():
                yield from ((command, option, value) for value in (*always.split(), *values.split()))
    yield from (("bench serve", "--request-rate", value) for value in ("nan", "0", "-1", "-inf", "x"))


@pytest.mark.parametrize(("command", "option"), dict.fromkeys((c, o) for c, o, _ in number_options()))
def test_bad_numbers_are_one_line_that_names_the_option(capsys, monkeypatch, command, option):
    monkeypatch.setattr("builtins.input", lambda prompt="": (_ for _ in ()).throw(EOFError))
    for name in ("generate", "chat"):
        monkeypatch.setattr(f"leadline.cli.{name}.open_llm", lambda model, options: fake_open_llm(options))
    monkeypatch.setattr("leadline.cli.serve.run", lambda *given: pytest.fail("serves"))
    for value in (value for c, o, value in number_options() if (c, o) == (command, option)):
        monkeypatch.setattr(sys, "argv", ["leadline", *command.split(), f"{option}={value}"])
        with pytest.raises(SystemExit) as stopped:
            cli_main.main()
        captured = capsys.readouterr()
        assert stopped.value.code in (1, 2), value
        line = captured.err.removeprefix(options.RANDOM_MODEL.format("MODEL") + "\n")
        assert line.startswith("error: "), value
        assert option in line, value
        assert captured.err.count("\n") == 1, value
        assert captured.out == "", value


def test_unknown_model_word(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["leadline", "generate", "x", "--model", "/no/such/folder"])
    with pytest.raises(SystemExit) as stopped:
        cli_main.main()
    assert stopped.value.code == 1
    assert "expected a checkpoint folder or a hub id" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["nonsense"], ["generate", "x", "--weights", "tiny"], ["ops", "--device", "abacus"]])
def test_wrong_usage_is_status_2(run, args):
    assert run(*args).exit_code == 2


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["nonsense"], "error: No such command 'nonsense'; see `leadline --help`\n"),
        (["bench"], "error: Missing command; see `leadline bench --help`\n"),
        (["plan", "--nonsense"], "error: No such option: --nonsense; see `leadline plan --help`\n"),
    ],
)
def test_wrong_usage_is_one_line_that_says_where_help_is(capsys, monkeypatch, args, line):
    monkeypatch.setattr(sys, "argv", ["leadline", *args])
    with pytest.raises(SystemExit) as stopped:
        cli_main.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == line


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("command", ["ops", "verify"])
@pytest.mark.parametrize("device", ["cuda", "meta", "nonsense"])
def test_a_device_that_is_not_there(run, command, device):
    result = run(command, "--device", device)
    assert result.exit_code == 2
    assert "a device that torch finds on" in result.stderr


def test_help_lists_commands_without_importing_them():
    code = (
        "import sys, leadline.cli.main as m\n"
        "sys.argv = ['leadline', '--help']\n"
        "try: m.main()\n"
        "except SystemExit: print('torch' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=START_SECONDS
    )
    assert result.stdout.rstrip().endswith("False")
    for name in cli_main._COMMANDS:
        assert name in result.stdout


def test_import_leadline_is_light():
    code = "import sys, leadline; leadline.SamplingParams(n=2); leadline.PromptError; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=START_SECONDS
    )
    assert result.stdout == "False\n"
    assert all(hasattr(leadline, name) for name in leadline.__all__ if name != "LLM")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = leadline.nothing


def test_chat_over_a_pipe(run):
    result = run("chat", "-n", 4, "--system", "S", stdin="one\n\ntwo\n/reset\nthree\n/exit\nfour\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "abca\n" * 3


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/nonsense", "/nonsense: no such command"),
        ("/image /no/such.png", "image '/no/such.png'"),
        ("/image", "/image: expected a path behind it"),
    ],
)
def test_a_pipe_ends_at_its_first_bad_line(run, line, error):
    """No answer without the image that it is about, and a status that a script can see."""
    result = run("chat", "-n", 2, stdin=f"one\n{line}\nx\n")
    assert result.exit_code == 1
    assert result.stdout == "ab\n"
    assert error in str(result.exception)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--effort", "999"], "--effort: expected 1 to 100 or one of"),
        (["--effort", "much"], "--effort: expected 1 to 100 or one of"),
        (["--effort", "50"], "--effort: expected none: this model's vocabulary lacks"),
        (["--thinking"], "--thinking: expected none: this model's vocabulary lacks"),
    ],
)
def test_chat_refuses_options_before_the_first_message(run, args, error):
    result = run("chat", *args, stdin="")
    assert result.exit_code == 1
    assert str(result.exception).startswith(error)


def test_a_chat_over_a_pipe_that_is_not_utf8(monkeypatch):
    """In a locale that lets broken bytes through as well."""
    code = (
        "import sys, leadline.cli.main as m, leadline.cli.chat as c\n"
        "from tests.support.fake_llm import fake_llm\n"
        "c.open_llm = lambda *o: fake_llm('abc')\n"
        "sys.argv = ['leadline', 'chat', '-n', '3']\n"
        "m.main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], input=b"\xff\xfe\n", capture_output=True, timeout=START_SECONDS,
        env={**os.environ, "LC_ALL": "C"}, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stdout == b""
    assert result.stderr.startswith(b"error: stdin: expected UTF-8 text, got ")
    assert result.stderr.count(b"\n") == 1


def test_chat_keeps_and_forgets_the_conversation(run, monkeypatch):
    seen = []
    monkeypatch.setattr("leadline.llm.render_chat", lambda tokenizer, messages, **options: seen.append(
        [(message["role"], message["content"]) for message in messages]) or fake_prompt(tokenizer))  # fmt: skip
    run("chat", "-n", 2, stdin="one\ntwo\n/reset\nthree\n")
    assert seen == [
        [("user", "one")],
        [("user", "one"), ("assistant", "ab"), ("user", "two")],
        [("user", "three")],
    ]


def fake_prompt(tokenizer):
    from leadline.text.chat import render_chat

    return render_chat(tokenizer, [{"role": "user", "content": "x"}])


def test_ops(run):
    rows = json.loads(run("ops", "--json").stdout)["operators"]
    assert {"op": "rms_norm", "impl": "reference", "runs": True, "reason": ""} in rows
    assert "rms_norm" in run("ops", "--device", "cpu").stdout


def test_terminal_text_is_harmless(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert options.for_terminal("a\x1b[2J\x9b\x07\tb\n") == "a\ufffd[2J\ufffd\ufffd\tb\n"


def run_with_streams(words, streams, **variables):
    """Runs `leadline WORDS` (a fake model, if any) through a shell that does `streams` to its standard streams."""
    model = (
        "import leadline.cli.chat as c, leadline.cli.generate as g\n"
        "from tests.support.fake_llm import fake_llm\n"
        "c.open_llm = g.open_llm = lambda *o: fake_llm('é')\n"
    )
    command = f"import sys, leadline.cli.main as m\nsys.argv = ['leadline', *{words.split()!r}]\nm.main()\n"
    code = model * words.startswith(("generate", "chat")) + command
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {streams}', sys.executable, code], capture_output=True, timeout=START_SECONDS,
        env={**os.environ, **variables}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "streams"),
    [("generate x -n 3", ">&-"), ("generate x -n 3", "2>&-"), ("generate - -n 3", "<&-"), ("chat", "<&-")],
)
def test_closed_streams_are_empty(words, streams):
    result = run_with_streams(words, streams)
    assert result.returncode == 0, result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("words", ["generate x -n 3", "generate x -n 3 --json", "plan", "plan --json", "ops", "--help"])
def test_a_full_disk_behind_stdout_is_one_line(words):
    result = run_with_streams(words, ">/dev/full")
    assert result.returncode == 1
    assert result.stderr == b"error: stdout: No space left on device\n"


def test_output_is_utf8_in_every_locale():
    result = run_with_streams("generate \u4e16 -n 1 --json", "", PYTHONIOENCODING="latin-1")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["prompt"] == "\u4e16"
    assert "\u4e16".encode() in result.stdout


class Terminal:
    """`leadline` in a terminal of its own, on a fake model that answers `abcabc...` for ever."""

    def __init__(self, *args):
        code = (
            "import sys, leadline.cli.main as m, leadline.cli.chat as c, leadline.cli.generate as g\n"
            "from tests.support.fake_llm import fake_llm\n"
            "c.open_llm = g.open_llm = lambda *o: fake_llm('abc', step_seconds=0.02)\n"
            f"sys.argv = ['leadline', *{args!r}]\n"
            "m.main()\n"
        )
        self.terminal, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=child, stdout=child, stderr=child, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)), env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(child)
        self.output = ""

    def wait_for(self, pattern):
        """Reads until the output since the last match holds `pattern`; returns what was read."""
        end = time.monotonic() + START_SECONDS
        while not (match := re.search(pattern, self.output)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.output!r}"
            if select.select([self.terminal], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self.terminal, 4096).decode()
                except OSError:  # the other side is gone
                    raise AssertionError(f"ended without {pattern!r}: {self.output!r}") from None
        seen, self.output = self.output[: match.end()], self.output[match.end() :]
        return seen

    def interrupt_until(self, pattern, keys=""):
        """Ctrl-C, again until `pattern` shows; before each one the next of `keys`, until that is echoed.

        At a prompt keys are needed: a Ctrl-C that comes just before readline waits, or that takes away input on which
        readline is about to act, has no effect before the next key.
        """
        end = time.monotonic() + START_SECONDS
        for key in itertools.chain(keys, itertools.repeat("")):
            if key:
                self.type(key)
                self._read_until(key, seconds=2)
            self.type("\x03")
            if self._read_until(pattern, seconds=2) or time.monotonic() > end:
                break
        return self.wait_for(pattern)

    def _read_until(self, pattern, seconds):
        """Whether the output since the last match holds `pattern` within so many seconds."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.output) and time.monotonic() < end:
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.output += os.read(self.terminal, 4096).decode()
        return re.search(pattern, self.output) is not None

    def type(self, text):
        os.write(self.terminal, text.encode())

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@pytest.fixture
def terminal():
    opened = []

    def start(*args):
        opened.append(Terminal(*args))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_ctrl_c_stops_an_answer_but_not_the_chat(terminal):
    chat = terminal("chat", "--max-tokens", "0")
    for _ in range(2):
        chat.wait_for("> ")
        chat.type("hello\n")
        chat.wait_for("abcabc")
        chat.interrupt_until(r"tokens in .* s, stopped")
    chat.wait_for("> ")
    chat.type("half a line")
    chat.interrupt_until("> ", keys=string.ascii_uppercase)
    chat.type("/exit\n")
    assert chat.process.wait(START_SECONDS) == 0
    assert "Traceback" not in chat.output


def test_ctrl_c_ends_generate_with_130_and_no_traceback(terminal):
    generate = terminal("generate", "x", "--max-tokens", "0")
    generate.wait_for("abcabc")
    generate.type("\x03")
    assert generate.process.wait(START_SECONDS) == 130
    while select.select([generate.terminal], [], [], 0.1)[0]:
        try:
            generate.output += os.read(generate.terminal, 4096).decode()
        except OSError:
            break
    assert "Traceback" not in generate.output


def test_version_needs_no_command(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"{leadline.__version__}\n")


@pytest.mark.parametrize(
    ("width", "variable", "expected"), [(1024, None, [1]), (1025, None, []), (64, "2", []), (1025, "2", [])]
)
def test_small_models_take_one_thread_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, width: int, variable: str | None, expected: list[int]
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    options.choose_threads(SimpleNamespace(hidden_size=width))  # type: ignore[arg-type]
    assert chosen == expected
