"""The requests that are sent to huggingface_hub, and the messages that its errors become. The tests
use no network: `snapshot_download` is replaced."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from pegboard_model_source_hub.hub import HubSource

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelReference,
    ModelSourceSetup,
)

REPOSITORY = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "tokenizer.model",
    "merges.txt",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "consolidated.pth",
    "optimizer.pt",
    "a.gguf",
    "sub/b.gguf",
    "README.md",
    "modeling_x.py",
    "image.png",
]


class Hub:
    """Replaces snapshot_download: filters REPOSITORY in the same way and remembers the requests."""

    def __init__(self, root: Path) -> None:
        self.root = root / "snapshot"
        self.cache = root / "cache"
        self.files = REPOSITORY
        self.asked: dict = {}
        self.error: Exception | None = None
        self.count = 0
        self.steps: list[tuple[str, int, int | None]] = []

    def download(self, repo_id, *, allow_patterns, ignore_patterns, tqdm_class, **more):
        self.asked = {"repo_id": repo_id, **more}
        self.count += 1
        if self.error is not None:
            raise self.error
        for name in self.files:
            if any(fnmatch(name, p) for p in allow_patterns) and not any(
                fnmatch(name, p) for p in ignore_patterns
            ):
                path = self.root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"x")
        self.root.mkdir(exist_ok=True)
        with tqdm_class(total=10, unit="B", disable=False, name="huggingface_hub.x") as bar:
            bar.update(4)
            bar.update(6)
        with tqdm_class(total=2, unit="it", disable=True) as bar:
            bar.update(1)
        return str(self.root)

    def fetch(
        self,
        file=None,
        revision=None,
        patterns=(),
        token=None,
        offline=False,
        is_chosen=False,
        loaders=("*.bin", "*.pt", "*.pth", "*.safetensors"),
    ) -> LocalFiles:
        setup = ModelSourceSetup(self.cache, token, offline, is_chosen, loaders)
        source = HubSource(None, setup)
        reference = ModelReference("hub", "org/name", revision, file)
        return source.fetch(reference, FileFilter(patterns), lambda *step: self.steps.append(step))

    @property
    def fetched(self) -> set[str]:
        return {
            path.relative_to(self.root).as_posix()
            for path in self.root.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.download)
    monkeypatch.setattr(constants, "default_home", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "huggingface" / "hub"))
    return hub


def test_fetches_the_model_and_nothing_that_runs(hub):
    files = hub.fetch()
    assert files.root == hub.root
    assert hub.fetched == set(REPOSITORY[:7]) | {
        name for name in REPOSITORY if "safetensors" in name
    }


SHARDS = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
SAVED = ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "sub/x.bin"]


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        ([*SHARDS, "pytorch_model.bin.index.json"], [*SHARDS, "pytorch_model.bin.index.json"]),
        (["pytorch_model.bin", "model.pt"], ["pytorch_model.bin"]),
        (["model.pt", "other.pth"], ["model.pt", "other.pth"]),
        (["pytorch_model.bin", "model.safetensors"], ["model.safetensors"]),
        (["model.ckpt", "model.pkl"], []),
    ],
)
def test_pickled_weights_come_only_if_there_are_no_others(hub, weights, fetched):
    hub.files = ["config.json", *SAVED, *weights]
    assert hub.fetch().root == hub.root
    assert hub.fetched == {"config.json", *fetched}


def test_pickled_weights_after_a_broken_download(hub):
    """Some shards, and what another program has fetched, are there already."""
    hub.files = ["config.json", *SAVED, *SHARDS]
    hub.root.mkdir()
    for name in ("training_args.bin", SHARDS[0]):
        (hub.root / name).write_bytes(b"x")
    hub.fetch()
    assert hub.fetched == {"config.json", "training_args.bin", *SHARDS}


def test_pickled_weights_need_a_loader(hub):
    hub.files = ["config.json", "pytorch_model.bin", "model.pt"]
    hub.fetch(loaders=("*.safetensors", "*.gguf"))
    assert hub.fetched == {"config.json"}
    assert hub.count == 1
    hub.fetch(loaders=("*.pt",))
    assert hub.fetched == {"config.json", "model.pt"}


SPLIT = [f"big/model-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]


def test_all_parts_of_a_split_gguf_file_come(hub):
    hub.files = [*REPOSITORY, *SPLIT]
    assert hub.fetch(file=SPLIT[0]).root == hub.root / SPLIT[0]
    assert hub.fetched == set(SPLIT)


@pytest.mark.parametrize(
    ("wanted", "fetched"),
    [
        ("Q4_K_M", ["model-Q4_K_M.gguf"]),
        ("Q8_0", SPLIT),
        ("q8_0", SPLIT),
        ("IQ4_XS", ["model.iq4_xs.gguf"]),
    ],
)
def test_a_gguf_file_by_the_type_of_its_weights(hub, wanted, fetched):
    hub.files = [
        *REPOSITORY,
        *SPLIT,
        "model-Q4_K_M.gguf",
        "model-UD-Q4_K_M_L.gguf",
        "model.iq4_xs.gguf",
    ]
    assert hub.fetch(file=wanted).root == hub.root / fetched[0]
    assert hub.fetched >= set(fetched)


def test_a_type_that_names_no_file_or_several(hub):
    hub.files = ["a-Q4_0.gguf", "b-Q4_0.gguf", "mmproj-Q8_0.gguf"]
    with pytest.raises(
        ModelError, match=r"several models of the type Q4_0: a-Q4_0\.gguf, b-Q4_0\.gguf"
    ):
        hub.fetch(file="Q4_0")
    with pytest.raises(
        ModelError, match="contains no Q8_0 GGUF file; name one as org/name:FILE.gguf"
    ):
        hub.fetch(file="Q8_0")


def test_a_gguf_file_comes_alone(hub):
    assert hub.fetch(file="sub/b.gguf").root == hub.root / "sub" / "b.gguf"
    assert hub.fetched == {"sub/b.gguf"}


@pytest.mark.parametrize("patterns", [("*",), ("*.bin", "config.json")])
def test_pickles_are_not_fetched_by_a_pattern(hub, patterns):
    hub.fetch(patterns=patterns)
    assert hub.fetched
    assert not any(name.endswith((".bin", ".pt", ".pth")) for name in hub.fetched)


def test_what_the_user_said_is_passed_on(hub):
    hub.fetch(revision="v1", token="secret", offline=True)
    assert hub.asked["repo_id"] == "org/name"
    assert (hub.asked["revision"], hub.asked["token"], hub.asked["local_files_only"]) == (
        "v1",
        "secret",
        True,
    )
    hub.fetch()
    assert (hub.asked["revision"], hub.asked["token"], hub.asked["local_files_only"]) == (
        None,
        None,
        False,
    )


def test_the_users_cache_is_used_if_there_is_one(hub, monkeypatch, tmp_path):
    hub.fetch()
    assert hub.asked["cache_dir"] == hub.cache / "hub"
    Path(constants.HF_HUB_CACHE).mkdir(parents=True)
    hub.fetch()
    assert hub.asked["cache_dir"] is None
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "moved"))
    hub.fetch()
    assert hub.asked["cache_dir"] is None


def test_a_folder_that_the_user_chose_comes_first(hub):
    Path(constants.HF_HUB_CACHE).mkdir(parents=True)
    hub.fetch(is_chosen=True)
    assert hub.asked["cache_dir"] == hub.cache


def test_progress_counts_bytes_only(hub):
    hub.fetch()
    assert hub.steps == [("org/name", 4, 10), ("org/name", 10, 10)]


def test_repositories_without_a_model_say_what_to_name(hub):
    hub.files = ["a.gguf"]
    with pytest.raises(ModelError, match=r"org/name:FILE\.gguf or org/name:Q4_K_M; see"):
        hub.fetch()
    with pytest.raises(ModelError, match=r"contains no file 'c\.gguf'"):
        hub.fetch(file="c.gguf")


def _http(kind: type[Exception], status: int) -> Exception:
    response = httpx.Response(status, request=httpx.Request("GET", "https://example.test/x"))
    return kind("told by the server", response=response)


@pytest.mark.parametrize(
    ("error", "more", "message"),
    [
        (
            _http(errors.GatedRepoError, 403),
            {},
            r"gated and no token was given: accept its terms at .*org/name.*HF_TOKEN",
        ),
        (_http(errors.GatedRepoError, 403), {"token": "t"}, "gated and your token has no access"),
        (
            _http(errors.RepositoryNotFoundError, 404),
            {},
            r"no directory org/name here and no repository org/name .*private",
        ),
        (_http(errors.RevisionNotFoundError, 404), {"revision": "v9"}, "no revision 'v9'"),
        (_http(errors.HfHubHTTPError, 500), {}, "answered with an error.*told by the server"),
        (errors.LocalEntryNotFoundError("x"), {"offline": True}, r"not in the cache.*offline"),
        (
            errors.LocalEntryNotFoundError("no route"),
            {},
            (
                r"^there is no directory org/name here, [^;]*cannot be reached: check the path or "
                r"the network$"
            ),
        ),
        (errors.HFValidationError("bad id"), {}, "expected org/name: bad id"),
        (httpx.ConnectError("refused"), {}, "download failed: refused"),
        (httpx.ReadTimeout("slow"), {}, "download failed: slow"),
        (
            OSError(28, "No space left on device"),
            {},
            "the disk is full: free some space below .*HF_HUB_CACHE",
        ),
        (OSError(122, "Disk quota exceeded"), {}, "the disk is full: free some space"),
        (OSError(30, "Read-only file system"), {}, "cannot be written: move it with HF_HUB_CACHE"),
        (PermissionError(13, "Permission denied"), {}, "cannot be written: move it"),
        (OSError(5, "Input/output error"), {}, "run again to resume it"),
    ],
)
def test_errors_say_what_to_do(hub, monkeypatch, error, more, message):
    hub.error = error
    with pytest.raises(ModelError, match=message) as caught:
        hub.fetch(**more)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__, (
        "one sentence, no chain"
    )
    monkeypatch.setenv("PEGBOARD_LOG_LEVEL", "DEBUG")
    with pytest.raises(ModelError, match=message) as caught:
        hub.fetch(**more)
    assert caught.value.__cause__ is error
    assert "secret" not in str(caught.value)
