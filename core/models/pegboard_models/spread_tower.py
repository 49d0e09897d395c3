"""SigLIP for images of any shape, whose learned positions are spread over each of them (Idefics 2,
Laurençon et al. 2024)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm
from pegboard_models.parameters import Parameters
from pegboard_models.vision import VisionLayer
from pegboard_models.vision_sizes import VisionSizes


class SpreadTower(nn.Module):
    """(patches of images [n, 3 · patch · patch], the number of the learned position of each [n]) →
    features [n, hidden]. depth: the number of layers that are built. norm: what the checkpoint
    calls the norm after them; None = there is none."""

    def __init__(
        self, build: Build, sizes: VisionSizes, depth: int, norm: str | None = None
    ) -> None:
        super().__init__()
        size = sizes.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "patch_embedding.weight": (size, 3, sizes.patch_size, sizes.patch_size),
            "patch_embedding.bias": (size,),
            "position_embedding.weight": (sizes.num_positions, size),
        }
        self.given = Parameters(build.at("embeddings"), shapes)
        layers = build.at("encoder").at("layers")
        self.layers = nn.ModuleList(VisionLayer(layers.at(index), sizes) for index in range(depth))
        self.norm = None if norm is None else LayerNorm(build.at(norm), size, sizes.eps)

    def forward(
        self, patches: Tensor, places: Tensor, count: int = 1, seen: Tensor | None = None
    ) -> Tensor:
        """count: images, which have as many patches. seen: see `VisionLayer.forward`."""
        given = self.given
        weight = given["patch_embedding.weight"].flatten(1)
        vectors = functional.linear(patches.to(weight.dtype), weight, given["patch_embedding.bias"])
        hidden = vectors + given["position_embedding.weight"][places]
        for layer in self.layers:
            hidden = layer.forward(hidden, count, seen)
        return hidden if self.norm is None else self.norm(hidden)
