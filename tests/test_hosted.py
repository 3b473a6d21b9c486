"""mlx-lm's own commands over compressed caches, each run by `mlx-tq` on a tiny model."""

import json
import socket
import sys
import threading
import types
import urllib.error
import urllib.request
from importlib import import_module

import pytest

mlx_lm = pytest.importorskip("mlx_lm")
pytest.importorskip("transformers")
import mlx.core as mx  # noqa: E402
import tiny_llama  # noqa: E402
from archs import configs  # noqa: E402
from mlx_lm.models import cache as cache_module  # noqa: E402
from test_cli import fails  # noqa: E402

import mlx_tq  # noqa: E402
from mlx_tq import TQFormat, TQKVCache, cli, smollm2  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_llama.make(tmp_path_factory.mktemp("tiny"))[2])


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    mlx_tq.integrate._enabled.clear()
    mlx_tq.view.remove_hook()


@pytest.fixture
def caches(monkeypatch):
    """The caches that mlx-lm's commands make, in order."""
    made = []

    def recording(make):
        def make_prompt_cache(*args):
            made.append(make(*args))
            return made[-1]

        return make_prompt_cache

    for name in ("generate", "chat"):
        module = import_module(f"mlx_lm.{name}")
        monkeypatch.setattr(module, "make_prompt_cache", recording(module.make_prompt_cache))
    return made


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "cache_prompt"])
def test_help_shows_their_flags_and_ours(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert f"usage: mlx-tq {command}" in out
    assert "--trust-remote-code" in out and "--tq-format NAME" in out and "--tq-off" in out
    assert "(default: smollm2)" in out and "mlx-community" not in out
    assert "(onlywith--tq-off)" in "".join(out.split())


BOUNDED = "--max-kv-size bounds mlx-lm's own cache only"
QUANTISED = "--kv-bits quantises mlx-lm's own cache only"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "--tq-format", "tq9"], "got 'tq9'"),
        (["chat", "--tq-format", "tq3", "--tq-off"], "--tq-off and --tq-format exclude each other"),
        (["generate", "--max-kv-size", "64"], BOUNDED),
        (["chat", "--max-kv-size", "64"], BOUNDED),
        (["cache_prompt", "--prompt", "x", "--prompt-cache-file", "y", "--max-kv-size", "64"], BOUNDED),
        (["generate", "--kv-bits", "4"], QUANTISED),
        (["serve", "--kv-bits", "4"], QUANTISED),
        (["cache_prompt", "--prompt", "x", "--prompt-cache-file", "y", "--kv-bits", "4"], QUANTISED),
        (["cache_prompt", "--prompt", "x"], "required: --prompt-cache-file"),
        (["serve", "--model", "/no/such/folder"], "got '/no/such/folder': no such folder"),
        (["serve", "--port", "99999"], "must be an address to listen on, got 127.0.0.1:99999"),
        (["serve", "--host", "192.0.2.1"], "must be an address to listen on, got 192.0.2.1:8080"),
        (["cache_prompt", "--prompt", "x", "--prompt-cache-file", "/no/such/file"], "in a folder that exists"),
        (["serve", "--draft-model", "/no/such/folder"], "got '/no/such/folder': no such folder"),
        (["chat", "--sing"], "unrecognized arguments: --sing"),
        (["generate", "--prompt-cache-file", "/no/such/file"], "a file that exists, got '/no/such/file'"),
        (["generate", "--ignore-chat-template", "-p", ""], "prompt"),
    ],
)
def test_mistakes_are_named(argv, message, folder, capsys):
    model = [] if "--model" in argv or argv[1:] == ["--prompt-cache-file", "/no/such/file"] else ["--model", folder]
    assert message in fails(capsys, *argv, *model)


def test_an_error_is_one_line_or_a_traceback(folder, monkeypatch, capsys):
    command = ["generate", "--model", folder, "--ignore-chat-template", "-p", ""]
    assert fails(capsys, *command).endswith("\n(MLX_TQ_DEBUG=1 shows where it was raised)")
    assert "MLX_TQ_DEBUG" not in fails(capsys, "generate", "--model", "/no/such/folder")
    monkeypatch.setenv("MLX_TQ_DEBUG", "1")
    with pytest.raises(ValueError, match="prompt"):
        cli.main(command)


def test_modules_are_left_as_they_were(folder, capsys):
    generate = import_module("mlx_lm.generate")
    before = dict(vars(generate))
    assert cli.main(["generate", "--model", folder, "-m", "2"]) == 0
    assert vars(generate) == before


def test_generate(folder, caches, capsys):
    command = ["generate", "--model", folder, "-m", "5", "--seed", "1", "--temp", "0.7", "-p", "he said"]
    assert cli.main([*command, "--tq-format", "k4v4"]) == 0
    out, err = capsys.readouterr()
    assert "Prompt: 8 tokens" in out  # with the template's two
    assert "layers 0-1: KVCache, compressed: K4/V4" in err
    assert f"Cache: {sum(c.nbytes for c in caches[-1]):,} bytes, K4/V4 uniform; attention: " in err
    assert all(type(c) is TQKVCache and c.format == TQFormat.preset("k4v4") and c.offset >= 12 for c in caches[-1])
    assert cli.main([*command, "--tq-off", "--kv-bits", "4", "--quantized-kv-start", "0"]) == 0
    assert "attention: mlx-lm's own" in capsys.readouterr().err
    assert {type(c) for c in caches[-1]} == {cache_module.QuantizedKVCache}


def test_the_demo_model_by_its_name(folder, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "fetch", lambda: folder)
    assert cli.main(["generate", "-m", "2"]) == 0
    assert "smollm2: layers 0-1" in capsys.readouterr().err


def test_generate_with_a_draft_model(folder, caches, capsys):
    command = ["generate", "--model", folder, "-m", "6", "-p", "he said 12"]
    assert cli.main([*command, "--draft-model", folder, "--num-draft-tokens", "2"]) == 0
    assert {type(c) for made in caches[-2:] for c in made} == {TQKVCache}
    drafted = capsys.readouterr().out.split("=" * 10)[1]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.split("=" * 10)[1] == drafted


def test_a_prompt_in_a_file(folder, tmp_path, monkeypatch, capsys):
    """What cache_prompt saves, generate goes on from, by the same name of the model."""
    monkeypatch.setattr(smollm2, "fetch", lambda: folder)
    path = str(tmp_path / "prompt.safetensors")
    assert cli.main(["cache_prompt", "--prompt-cache-file", path, "--prompt", "he " * 40, "--tq-format", "k4v4"]) == 0
    held = cache_module.load_prompt_cache(path)
    assert all(type(c) is TQKVCache and c.format == TQFormat.preset("k4v4") and c.offset > 40 for c in held)
    command = ["generate", "--prompt-cache-file", path, "-p", "more", "-m", "3"]
    for flags in ([], ["--tq-format", "k4v4"], ["--model", "smollm2"]):
        assert cli.main([*command, *flags]) == 0
        err = capsys.readouterr().err
        assert "bytes, K4/V4 uniform; attention: " in err
        assert "centered" not in err  # the default, which the file is not in
    for flags in (["--tq-format", "tq3"], ["--tq-off"]):
        assert "K4/V4 uniform" in fails(capsys, *command, *flags)
    assert "Providing a different model" in fails(capsys, *command, "--model", folder)
    own = str(tmp_path / "own.safetensors")
    assert cli.main(["cache_prompt", "--prompt-cache-file", own, "--prompt", "he", "--tq-off"]) == 0
    command[2] = own
    assert cli.main(command) == 0
    assert "attention: mlx-lm's own" in capsys.readouterr().err
    assert "not compressed, got 'default'" in fails(capsys, *command, "--tq-format", "default")


@pytest.fixture
def architecture(monkeypatch):
    """Makes `generate` and `cache_prompt` load the tiny model of an architecture in place of the one they are given."""
    chosen = []

    def in_place_of(load):
        def loading(*args, **options):
            mlx_tq.disable(chosen[-1])  # as is a model that was just loaded
            return chosen[-1], *load(*args, **options)[1:]

        return loading

    for name in ("generate", "cache_prompt"):
        module = import_module(f"mlx_lm.{name}")
        monkeypatch.setattr(module, "load", in_place_of(module.load))
    return lambda name: chosen.append(configs.build(name))


PACKED = {
    "deepseek_v3": "latent compressed once as key and value: K4/V4 uniform; rope key not quantised",
    "longcat_flash": "latent compressed once as key and value: K4/V4 uniform; rope key not quantised",
    "falcon_h1": "K4/V4 uniform",
    "baichuan_m1": "K4/V4 uniform",
}


@pytest.mark.parametrize("name", PACKED)
def test_latents_and_lists_of_caches_in_a_file(name, folder, architecture, tmp_path, capsys):
    """A format of which the model's caches have a derived one is that of the file."""
    architecture(name)
    path = str(tmp_path / "prompt.safetensors")
    saving = ["cache_prompt", "--model", folder, "--prompt-cache-file", path, "--prompt", "some " * 40]
    command = ["generate", "--prompt-cache-file", path, "-p", "more", "-m", "3"]
    assert cli.main([*saving, "--tq-format", "k4v4"]) == 0
    for flags in ([], ["--tq-format", "k4v4"]):
        assert cli.main([*command, *flags]) == 0
        held = capsys.readouterr().err.splitlines()[-1]
        assert f" bytes, {PACKED[name]}; attention: " in held
        assert ("prompts over decoded rows" in held) == ("latent" in PACKED[name])
    for flags in (["--tq-format", "tq3"], ["--tq-off"]):
        assert PACKED[name] in fails(capsys, *command, *flags)
    assert cli.main([*saving, "--tq-off"]) == 0
    assert cli.main(command) == 0
    assert " bytes, not compressed; attention: mlx-lm's own" in capsys.readouterr().err
    assert "not compressed, got 'k4v4'" in fails(capsys, *command, "--tq-format", "k4v4")
    assert cli.main(["generate", "--model", folder, "-p", "more", "-m", "3", "--tq-format", "k4v4"]) == 0
    assert PACKED[name] in capsys.readouterr().err.splitlines()[-1]


def test_a_file_of_another_model(folder, architecture, tmp_path, capsys):
    """Its caches are others, or their number is, or it holds none of a draft model."""
    saved = {}
    for name in ("llama", "longcat_flash", "qwen3_next"):
        architecture(name)
        for flags in ("--tq-off", "--tq-format=default"):
            saved[name, flags] = str(tmp_path / f"{name}{flags}.safetensors")
            command = ["cache_prompt", "--model", folder, "--prompt", "some", "--prompt-cache-file"]
            assert cli.main([*command, saved[name, flags], flags]) == 0
    want = {
        "llama": "4 KVCache",
        "longcat_flash": "4 CacheList(KVCache, KVCache)",
        "qwen3_next": "2 ArraysCache, 2 KVCache",
    }
    for name, made in want.items():
        architecture(name)
        for (other, _), path in saved.items():
            command = ["generate", "--prompt-cache-file", path, "-p", "more", "-m", "2"]
            if other == name:
                assert cli.main(command) == 0
            else:
                message = f"--prompt-cache-file must hold the caches of the model, {made}, got {want[other]}"
                assert message in fails(capsys, *command)
    command = ["generate", "--prompt-cache-file", saved["llama", "--tq-off"], "-p", "more"]
    architecture("llama")
    assert "8 KVCache, got 4 KVCache" in fails(capsys, *command, "--draft-model", folder)


def test_files_of_bounded_and_quantised_caches(folder, tmp_path, capsys):
    for flags in (["--max-kv-size", "64"], ["--kv-bits", "8", "--quantized-kv-start", "0"]):
        path = str(tmp_path / "prompt.safetensors")
        command = ["cache_prompt", "--model", folder, "--prompt-cache-file", path, "--prompt", "some", "--tq-off"]
        assert cli.main([*command, *flags]) == 0
        assert cli.main(["generate", "--prompt-cache-file", path, "-p", "more", "-m", "2"]) == 0
        assert "not compressed" in capsys.readouterr().err


def test_a_file_that_is_no_prompt_cache(folder, tmp_path, capsys):
    path = str(tmp_path / "prompt.safetensors")
    message = f"--prompt-cache-file must be one that cache_prompt saved, got {path!r}"
    command = ["generate", "--prompt-cache-file", path, "-p", "more", "-m", "2"]
    cache_module.save_prompt_cache(path, [cache_module.KVCache()])
    assert f"{message}, which does not name its model" in fails(capsys, *command)
    mx.save_safetensors(path, {"a": mx.zeros(3)})
    assert message in fails(capsys, *command)
    assert cli.main(["cache_prompt", "--model", folder, "--prompt-cache-file", path, "--prompt", "some"]) == 0
    whole = (tmp_path / "prompt.safetensors").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(b"TQKVCache", b"MyKVCache"), b""):
        (tmp_path / "prompt.safetensors").write_bytes(damaged)
        assert message in fails(capsys, *command)


def test_chat(folder, caches, monkeypatch, capsys):
    from mlx_lm import chat

    said = iter(["he said 12", "some more", "r", "he", "q"])
    monkeypatch.setattr(chat.ChatUI, "prompt", lambda self: next(said))
    assert cli.main(["chat", "--model", folder, "-m", "4", "--tq-format", "compact"]) == 0
    assert "compressed: K3/V2" in capsys.readouterr().err
    assert len(caches) == 2  # r begins anew
    assert all(type(c) is TQKVCache and c.offset > 0 for made in caches for c in made)
    assert caches[0][0].offset > caches[1][0].offset


def test_the_end_of_what_chat_reads_ends_it(folder, monkeypatch):
    from mlx_lm import chat

    def nothing_more(self):
        raise EOFError

    monkeypatch.setattr(chat.ChatUI, "prompt", nothing_more)
    assert cli.main(["chat", "--model", folder]) == 0


# ------------------------------------------------------------------ serving


@pytest.fixture
def serve(folder, monkeypatch):
    """Runs `mlx-tq serve` in a thread, on a port of its own choice; gives a function that posts a completion."""
    from mlx_lm import server

    running, started = {}, threading.Event()

    class Server(server.ThreadingHTTPServer):
        def __init__(self, address, handler):
            super().__init__(("127.0.0.1", 0), handler)
            running["http"] = self
            started.set()

    run = server._run_http_server
    monkeypatch.setattr(
        server,
        "_run_http_server",
        lambda host, port, generator: running.update(generator=generator) or run(host, port, generator, Server),
    )

    def start(*flags):
        running["thread"] = threading.Thread(target=cli.main, args=(["serve", "--model", folder, *flags],))
        running["thread"].start()
        assert started.wait(60)

        def post(text, n=4, **options):
            body = json.dumps({"prompt": text, "max_tokens": n, "temperature": 0, **options}).encode()
            url = f"http://127.0.0.1:{running['http'].server_address[1]}/v1/completions"
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.loads(response.read())

        return post, running["generator"]

    yield start
    running["http"].shutdown()
    running["generator"].stop_and_join()
    running["thread"].join()
    running["http"].server_close()


def test_serve(folder, serve):
    post, generator = serve("--tq-format", "k4v4")
    results = []
    threads = [threading.Thread(target=lambda i=i: results.append(post("he said 12 " * (5 + i)))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r["usage"]["completion_tokens"] for r in results] == [4] * 3
    again = post("he said 12 " * 5 + "and")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert generator.model_provider.is_batchable
    held = generator.prompt_cache.stats_by_type()
    assert generator.prompt_cache.nbytes > 0 and held
    model = generator.model_provider.model
    assert all(type(c) is TQKVCache and c.format == TQFormat.preset("k4v4") for c in model.make_cache())
    with pytest.raises(urllib.error.HTTPError) as refused:  # a request's mistake does not end the server
        post("he", model="/no/such/folder")
    assert "no such folder" in refused.value.read().decode()
    assert generator.is_healthy
    assert post("he")["choices"]


def test_a_port_in_use(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"got 127.0.0.1:{port}" in fails(capsys, "serve", "--model", folder, "--port", str(port))


def test_serve_with_a_draft_model(folder, serve):
    post, generator = serve("--draft-model", folder)
    assert post("he said 12", 6)["usage"]["completion_tokens"] == 6
    provider = generator.model_provider
    for model in (provider.model, provider.draft_model):
        assert {type(c) for c in cache_module.make_prompt_cache(model)} == {TQKVCache}


# ------------------------------------------------------------------ evaluate


@pytest.fixture
def harness(monkeypatch):
    """As much of lm-evaluation-harness as mlx_lm.evaluate asks for; its one task keeps the model it is given."""
    models = []

    def module(name, **names):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(names)

    def simple_evaluate(model, **options):
        request = types.SimpleNamespace(args=("he said", " 12"))
        models.append(model)
        return {"results": {"task": {"logprob": model.loglikelihood([request])[0][0]}}}

    module("lm_eval", simple_evaluate=simple_evaluate)
    module("lm_eval.api")
    module("lm_eval.api.model", LM=type("LM", (), {"__init__": lambda self: None}))
    module("lm_eval.api.registry", register_model=lambda name: lambda cls: cls)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    yield models
    sys.modules.pop("mlx_lm.evaluate", None)


def test_evaluate(folder, harness, tmp_path, monkeypatch, capsys):
    evaluate = import_module("mlx_lm.evaluate")
    monkeypatch.setattr(evaluate, "version", lambda name: "0")
    command = ["evaluate", "--model", folder, "--tasks", "task", "--output-dir", str(tmp_path)]
    scores = []
    for flags in ([], ["--tq-format", "tq3"], ["--tq-off"]):
        assert cli.main([*command, *flags]) == 0
        scores.append(json.loads(capsys.readouterr().out.partition("Results:")[2])["logprob"])
    assert [type(model._model.__dict__.get("make_cache")).__name__ for model in harness] == [
        *("_MakeCache", "_MakeCache", "NoneType")
    ]
    assert scores[1] != scores[2] == pytest.approx(scores[0], abs=0.1)


def test_evaluate_without_the_harness(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    assert "needs lm-evaluation-harness: pip install lm-eval" in fails(capsys, "evaluate", "--model", folder)
