"""An IO processor in vLLM's form: the distance between two texts."""

from collections.abc import Sequence

from vllm import PoolingParams
from vllm.config import VllmConfig
from vllm.entrypoints.pooling.pooling.protocol import IOProcessorResponse
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor


class Distance(IOProcessor[list[str], float]):
    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self.model = vllm_config.model_config.model

    def parse_request(self, request):
        texts = (request["data"] if isinstance(request, dict) else request.data)["texts"]
        if len(texts) != 2:
            raise ValueError("expected two texts")
        return texts

    def validate_or_generate_params(self, params=None):
        return params or PoolingParams(use_activation=True)

    def pre_process(self, prompt, request_id=None, **kwargs):
        return [text if isinstance(text, dict) else {"prompt": text} for text in prompt]

    def post_process(
        self, model_output: Sequence[PoolingRequestOutput], request_id=None, **kwargs
    ) -> float:
        first, second = (output.outputs.data for output in model_output)
        return float((first - second).norm())

    def output_to_response(self, plugin_output: float) -> IOProcessorResponse:
        return IOProcessorResponse(data={"distance": plugin_output})


def register():
    return "vllm_io_processor.Distance"


def refuse():
    return None
