"""Kind `multimodal_processor`: makes of images, audio and video what a model computes with. Keyed
by the Hugging Face architecture name. Runs in threads of A."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pegboard.data.media import MediaSource
from pegboard.interfaces.spec import Spec
from pegboard.interfaces.weight_loader import Checkpoint

if TYPE_CHECKING:
    import numpy as np

    from pegboard.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalProcessorSpec(Spec):
    """Entry-point name: the architecture's name, as checkpoints write it. modalities: those that
    the model takes, of "image", "audio" and "video". reader: "module:Class" of the `MediaReader`
    for them. logits_processors: names of those that its questions need; the engine has them besides
    the configured ones.

    flags: "transcribes" = it is a `Transcriber`."""

    FLAGS = frozenset({"transcribes"})

    modalities: tuple[str, ...]
    logits_processors: tuple[str, ...] = ()
    reader: str = "pegboard_media.reader:Reader"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReaderSetup:
    """domains: the hosts that may be asked for media; () = all but those of private networks.
    local_path: the folder below which files may be read; None = no file. options: modality → how
    its files are decoded."""

    domains: Sequence[str] = ()
    local_path: str | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Video(NamedTuple):
    """frames: uint8 [frames, height, width, 3]. fps: how many of them a second has. seconds: when
    each of them is shown, from the beginning of the video. sound: decodes the sound of the file as
    (float32 [samples], samples per second), None if it has none; raises RequestError. None = the
    frames come without a file."""

    frames: "np.ndarray"
    fps: float
    seconds: tuple[float, ...]
    sound: "Callable[[], tuple[np.ndarray, int] | None] | None" = None


class MediaReader(Protocol):
    """Built as `Reader(setup)`. Used in threads."""

    def read(self, source: MediaSource) -> tuple[Any, bytes]:
        """Return the item as the processor takes it, and bytes that say what it is: of two items
        with the same bytes, the second one is not processed again. An image is an RGB PIL image,
        audio is (float32 [samples], samples per second), a video is a `Video`. Raises RequestError,
        which names the item by its `path`."""


@dataclass(frozen=True, slots=True)
class MultiModalProcessorSetup:
    checkpoint: Checkpoint
    tokenizer: "Tokenizer"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What stands for an item in a prompt. text: as a chat writes it. token_ids: the tokens of this
    text that the item's tokens take the place of. Both are empty if an encoder-decoder model
    attends to the item, which then is not in the prompt.
    is_first: the items come before the prompt's own tokens, also before the one that begins it. The
    text is empty. If the prompt begins with token_ids, the items take their place.
    beginning: tokens that come before such items, once for all of them.
    ending: tokens that come after a prompt with such an item, unless it already ends with them."""

    text: str
    token_ids: tuple[int, ...]
    is_first: bool = False
    ending: tuple[int, ...] = ()
    beginning: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Processed:
    """token_ids: the tokens that take the place of the placeholder. is_row: bool [tokens], those
    whose embeddings are replaced by the rows that `encode` makes, in their order; None = all. Of an
    item that is not in the prompt, only the number of them counts.
    arrays: what `encode` gets. facts: plain values that `inputs` gets."""

    token_ids: Sequence[int]
    arrays: Mapping[str, "np.ndarray"]
    is_row: "np.ndarray | None" = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item whose tokens are start … stop of the prompt. facts: see `Processed`."""

    modality: str
    start: int
    stop: int
    facts: Mapping[str, Any]


class MultiModalProcessor(Protocol):
    def placeholder(self, modality: str) -> Placeholder:
        """Return what stands for an item of this modality in a prompt."""

    def process(self, modality: str, value: Any, options: Mapping[str, Any]) -> Processed:
        """Process one item, as a `MediaReader` returns it. The result depends on nothing else, so
        it is kept. options: how to process it (mm_processor_kwargs). Raises RequestError for
        options that it does not take."""


class PlacesRows(Protocol):
    """An addition to the MultiModalProcessor: clients may send the rows of an item in its place
    (enable_mm_embeds)."""

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        """Return the tokens of an item with this many rows, at least one, without arrays. Raises
        RequestError for a number that no item has."""


class PlacesFormedRows(Protocol):
    """As `PlacesRows`, for models whose items have a form that the number of rows does not tell. A
    processor has one of both."""

    def place_formed_rows(
        self, modality: str, num_rows: int, form: "Mapping[str, np.ndarray]"
    ) -> Processed:
        """Return the tokens of an item with this many rows, at least one, without arrays. form:
        what the client says of the item, name → int64 [numbers], such as image_grid_thw. Raises
        RequestError if the form is not that of an item with so many rows, and for names that it
        does not know."""


class PadsTexts(Protocol):
    """An addition to the MultiModalProcessor, for models whose texts all have the same length."""

    def padded(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a prompt without items, with those that the model also reads."""


class CountsItems(Protocol):
    """An addition to the MultiModalProcessor, for models that see less of an item among others."""

    def counted_options(self, counts: Mapping[str, int]) -> Mapping[str, Any]:
        """Return options of `process` for the items of a prompt. counts: modality → number. Options
        that were given are used in place of them."""


class RewritesTexts(Protocol):
    """An addition to the MultiModalProcessor, for models whose placeholders have several forms."""

    def rewritten(self, text: str) -> str:
        """Return the text of a prompt with items, with `Placeholder.text` in place of the other
        forms."""


class NumbersItems(Protocol):
    """An addition to the MultiModalProcessor, for models whose prompts say the numbers of items."""

    def heading(self, modality: str, number: int, facts: Mapping[str, Any]) -> Sequence[int]:
        """Return the tokens before those of an item. number: how many items of this modality are
        before it in the prompt. facts: see `Processed`."""


class PromptInputs(Protocol):
    """An addition to the MultiModalProcessor, for models that declare inputs or axes."""

    def inputs(
        self, token_ids: Sequence[int], items: Sequence[PlacedItem]
    ) -> Mapping[str, Sequence[int]]:
        """Return the numbers of each token of a whole prompt, by the name under which the model
        declares them. Those of a token depend only on the tokens and items up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a client wants of a recording. translates: into English. language: the code of the
    spoken one, such as "en"; None = the model has only one. text: what was said before, or words to
    expect. has_times: the answer says when something was said."""

    translates: bool = False
    language: str | None = None
    text: str = ""
    has_times: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with one item of audio, and the `SamplingParams.extra_args` of its request."""

    token_ids: Sequence[int]
    extra_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of an answer, from number `first` on, that were said from `start` to `stop`, in
    seconds."""

    start: float
    stop: float
    first: int
    token_ids: Sequence[int]


class Transcriber(Protocol):
    """An addition to the MultiModalProcessor: its model writes down what is said. rate: samples per
    second of the audio that it takes. seconds: the most that one prompt may have. languages: code →
    name in English. has_times: it knows when something was said."""

    rate: int
    seconds: int
    languages: Mapping[str, str]
    has_times: bool

    def question(self, wish: Wish) -> Question:
        """Return how the model is asked. Raises RequestError for a wish that it cannot fulfil."""

    def detection(self) -> tuple[Question, Mapping[int, str]] | None:
        """Return a question whose answer is one token, and the code of the language that each such
        token stands for. None = the model has only one language."""

    def segments(self, token_ids: Sequence[int], seconds: float) -> Sequence[Segment]:
        """Cut an answer with times into segments. seconds: of the audio."""
