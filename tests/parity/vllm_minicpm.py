"""Runs the towers and projectors of vLLM's MiniCPM-V and MiniCPM-o, in an interpreter that has
vLLM. Not imported by Pegboard.

Arguments: the folder of a checkpoint, a file with arrays of items, whose names are
"modality.array", and the file that is written, with the rows of each modality.
"""

from __future__ import annotations

import json
import os
import sys
from types import MethodType, SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    folder, given, target = sys.argv[1:]
    with open(f"{folder}/config.json") as file:
        config = json.load(file)
    tensors = load_file(f"{folder}/model.safetensors")
    items = load_file(given)
    torch.cuda.is_current_stream_capturing = lambda: False
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{target}.group", 0, "gloo")
        initialize_model_parallel(1, 1, backend="gloo")
        rows = {"image": images(config, tensors, items)}
        if "audio.num_frames" in items:
            rows["audio"] = speech(config, tensors, items)
    save_file({name: value.contiguous() for name, value in rows.items()}, target)


def below(tensors: Any, part: str) -> dict[str, Any]:
    start = f"{part}."
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def images(config: Any, tensors: Any, items: Any) -> Any:
    import torch
    from transformers import SiglipVisionConfig
    from vllm.model_executor.models import minicpmv
    from vllm.model_executor.models.idefics2_vision_model import Idefics2VisionTransformer

    values = {
        name: value for name, value in config["vision_config"].items() if name != "model_type"
    }
    vision = SiglipVisionConfig(**values)
    tower = Idefics2VisionTransformer(vision, apply_encoder_attention_mask=True, prefix="vpm")
    if config.get("drop_vision_last_layer", True):
        tower.encoder.layers = tower.encoder.layers[:-1]
    tower.load_weights(below(tensors, "vpm").items())
    is_new = str(config.get("version")) == "4.5"
    kind = minicpmv.Resampler4_5 if is_new else minicpmv.Resampler2_5
    width = config["hidden_size"]
    resampler = kind(config["query_num"], width, width // 128, vision.hidden_size)
    resampler.load_state_dict(below(tensors, "resampler"))
    for module in [*tower.modules(), *resampler.modules()]:
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    is_oldest = "version" not in config and "audio_config" not in config
    model = minicpmv.MiniCPMV2_5 if is_oldest else minicpmv.MiniCPMV2_6
    model = minicpmv.MiniCPMV4_5 if is_new else model
    sizes = items["image.tgt_sizes"]
    slices = items["image.pixel_values"].split(sizes.prod(1).tolist())
    pixels = [patches.permute(1, 2, 0, 3).flatten(2) for patches in slices]
    parts = SimpleNamespace(vpm=tower, resampler=resampler)
    data = {"pixel_values": pixels, "tgt_sizes": sizes}
    return torch.flatten(model.get_vision_hidden_states(parts, data), 0, 1)


def speech(config: Any, tensors: Any, items: Any) -> Any:
    import torch
    from transformers import WhisperConfig
    from vllm.model_executor.models import minicpmo

    audio = WhisperConfig(**config["audio_config"])
    audio._attn_implementation = "sdpa"
    encoder = minicpmo.MiniCPMWhisperEncoder(audio).eval()
    encoder.load_state_dict(below(tensors, "apm"))
    projector = minicpmo.MultiModalProjector(audio.encoder_ffn_dim // 4, config["hidden_size"])
    projector.load_state_dict(below(tensors, "audio_projection_layer"))
    step = config["audio_pool_step"]
    kind = minicpmo.MiniCPMOBaseModel
    parts = SimpleNamespace(
        config=SimpleNamespace(**{n: v for n, v in config.items() if n.startswith("audio_")}),
        apm=encoder,
        audio_projection_layer=projector,
        audio_avg_pooler=torch.nn.AvgPool1d(step, stride=step),
        audio_encoder_layer=-1,
    )
    for name in ("subsequent_chunk_mask", "_get_feat_extract_output_lengths"):
        setattr(parts, name, MethodType(getattr(kind, name), parts))
    counts = items["audio.num_frames"]
    mels = [*items["audio.input_features"].split(counts.tolist(), 1)]
    data = {"audio_features": mels, "audio_feature_lens": [counts]}
    return torch.cat([*kind.get_audio_hidden_states(parts, data)])


if __name__ == "__main__":
    main()
