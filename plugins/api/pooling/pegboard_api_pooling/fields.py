"""The bodies of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pegboard.data.pooling_params import TOKEN_TASKS, PoolingParams, Task
from pegboard_api_pooling.encodings import DType, Encoding, Endianness
from pegboard_chat.sampling_fields import Fields, Int32, Objects


class PoolingFields(Fields):
    """What all bodies have. PoolingParams checks the ranges."""

    model: str | None = None
    truncate_prompt_tokens: Int32 | None = None
    use_activation: bool | None = None
    priority: Int32 = 0
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    cache_salt: str | None = None
    user: str | None = None  # accepted and ignored, because it does not concern the answer

    def params(
        self, task: Task, dimensions: int | None = None, prompt_name: str | None = None
    ) -> PoolingParams:
        """Return the parameters of all inputs. Raises RequestError, which names the field that is
        wrong."""
        return PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            dimensions=dimensions,
            use_activation=self.use_activation,
            task=task,
            prompt_name=prompt_name,
        )


class ClassifyRequest(PoolingFields):
    """POST /classify. There is an input, which `prompt_field.read_prompts` checks, or the messages
    of a chat, which may have images. add_special_tokens: None = to inputs, and not to chats."""

    input: Any = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False


class EmbeddingRequest(ClassifyRequest):
    """POST /v1/embeddings. prompt_name: see `PoolingParams`."""

    encoding_format: Encoding = "float"
    embed_dtype: DType = "float32"
    endianness: Endianness = "native"
    dimensions: Int32 | None = None
    prompt_name: str | None = None


class PoolingRequest(EmbeddingRequest):
    """POST /pooling. task: None = results of tokens, if the model makes them, else what it does.
    data: for the server's IO processor, instead of an input. step_tag_id, returned_token_ids: see
    `PoolingParams`."""

    task: Task | Literal["plugin"] | None = None
    data: Any = None
    step_tag_id: Int32 | None = None
    returned_token_ids: list[Int32] | None = None

    def params_of(self, tasks: Sequence[str]) -> PoolingParams:
        """Return the parameters of all inputs. tasks: of the model. Raises RequestError, which
        names the field that is wrong."""
        task: Any = self.task
        if task is None:
            task = next((each for each in tasks if each in TOKEN_TASKS), None)
        return PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            dimensions=self.dimensions,
            use_activation=self.use_activation,
            step_tag_id=self.step_tag_id,
            returned_token_ids=None
            if self.returned_token_ids is None
            else tuple(self.returned_token_ids),
            task=task,
            prompt_name=self.prompt_name,
        )


class ScoreRequest(PoolingFields):
    """POST /score. text_1 and text_2 are also called data_1 and data_2."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class Document(Fields):
    """A document to rank, in the form of an object."""

    text: str


class RerankRequest(PoolingFields):
    """POST /rerank. top_n: how many documents to return; 0 = all. return_documents: with their
    texts."""

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Field(ge=0, lt=2**31)] = 0
    return_documents: bool = True
