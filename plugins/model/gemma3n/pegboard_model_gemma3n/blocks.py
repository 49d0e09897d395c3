"""The blocks of MobileNet-V5, which are those of MobileNetV4 (Qin et al. 2024). Features are
[1, channels, height, width]. Names of tensors are those of timm."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build
from pegboard_model_gemma3n.stages import Attending, Edge, Inverted
from pegboard_models.parameters import Parameters

EPS = 1e-6
DIVISOR = 8
"""Channels between the convolutions of a block are a multiple of it."""


def normalized(features: Tensor, weight: Tensor) -> Tensor:
    """Return features [1, channels, …] divided by the root mean square of their channels."""
    scale = (features.float().square().mean(1, keepdim=True) + EPS).rsqrt()
    return (features * scale * weight[:, None, None]).to(features.dtype)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return how much to add before and after `size`, so that a convolution makes ceil(size /
    stride) of it."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def convolve(
    features: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, groups: int = 1
) -> Tensor:
    """Return a convolution [1, channels out, …] of features [1, channels in, …]."""
    kernel = weight.shape[-1]
    height, width = features.shape[2:]
    padding = (*same_padding(width, kernel, stride), *same_padding(height, kernel, stride))
    padded = functional.pad(features, padding) if any(padding) else features
    return functional.conv2d(padded, weight, bias, stride, groups=groups)


class ConvNorm(nn.Module):
    """A convolution and a norm. is_each: of each channel alone. names: those of the checkpoint."""

    def __init__(
        self,
        build: Build,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        is_each: bool = False,
        is_active: bool = False,
        bias: bool = False,
        names: tuple[str, str] = ("conv", "bn"),
    ) -> None:
        super().__init__()
        conv, norm = names
        self.names = (f"{conv}.weight", f"{norm}.weight")
        self.bias = f"{conv}.bias" if bias else None
        shapes: dict[str, tuple[int, ...]] = {
            f"{conv}.weight": (outputs, 1 if is_each else inputs, kernel, kernel),
            f"{norm}.weight": (outputs,),
        }
        if self.bias is not None:
            shapes[self.bias] = (outputs,)
        self.given = Parameters(build, shapes)
        self.stride = stride
        self.groups = inputs if is_each else 1
        self.is_active = is_active

    def forward(self, features: Tensor) -> Tensor:
        weight, scale = (self.given[name] for name in self.names)
        bias = self.given[self.bias] if self.bias is not None else None
        convolved = convolve(features.to(weight.dtype), weight, bias, self.stride, self.groups)
        rows = normalized(convolved, scale)
        return functional.gelu(rows, approximate="tanh") if self.is_active else rows


def divisible(count: int) -> int:
    """Return the nearest multiple of the divisor that is not less than nine tenths."""
    rounded = max(DIVISOR, (count + DIVISOR // 2) // DIVISOR * DIVISOR)
    return rounded if rounded >= 0.9 * count else rounded + DIVISOR


def block_of(build: Build, inputs: int, block: Edge | Inverted | Attending) -> nn.Module:
    """Build a block that takes `inputs` channels."""
    if isinstance(block, Edge):
        return EdgeBlock(build, inputs, block)
    if isinstance(block, Inverted):
        return InvertedBlock(build, inputs, block)
    return AttentionBlock(build, inputs, block)


class EdgeBlock(nn.Module):
    def __init__(self, build: Build, inputs: int, block: Edge) -> None:
        super().__init__()
        inner = divisible(inputs * block.expansion)
        self.has_skip = inputs == block.channels and block.stride == 1
        self.expand = ConvNorm(
            build, inputs, inner, 3, stride=block.stride, is_active=True, names=("conv_exp", "bn1")
        )
        self.project = ConvNorm(build, inner, block.channels, 1, names=("conv_pwl", "bn2"))

    def forward(self, features: Tensor) -> Tensor:
        out = self.project.forward(self.expand.forward(features))
        return out + features if self.has_skip else out


class InvertedBlock(nn.Module):
    """is_scaled: the block's output has a scale for each channel, and the input is added where it
    has the same shape."""

    def __init__(
        self, build: Build, inputs: int, block: Inverted, *, is_scaled: bool = True
    ) -> None:
        super().__init__()
        inner = divisible(inputs * block.expansion)
        size = block.channels
        self.has_skip = is_scaled and inputs == size and block.stride == 1
        convolutions = []
        if block.start:
            stride = 1 if block.middle else block.stride
            place = build.at("dw_start")
            convolutions.append(
                ConvNorm(place, inputs, inputs, block.start, stride=stride, is_each=True)
            )
        convolutions.append(ConvNorm(build.at("pw_exp"), inputs, inner, 1, is_active=True))
        if block.middle:
            convolutions.append(
                ConvNorm(
                    build.at("dw_mid"),
                    inner,
                    inner,
                    block.middle,
                    stride=block.stride,
                    is_each=True,
                    is_active=True,
                )
            )
        convolutions.append(ConvNorm(build.at("pw_proj"), inner, size, 1))
        self.convolutions = nn.ModuleList(convolutions)
        self.scale = Parameters(build, {"layer_scale.gamma": (size,)}) if is_scaled else None

    def forward(self, features: Tensor) -> Tensor:
        out = features
        for convolution in self.convolutions:
            out = convolution.forward(out)
        if self.scale is not None:
            out = out * self.scale["layer_scale.gamma"][:, None, None]
        return out + features if self.has_skip else out


class AttentionBlock(nn.Module):
    def __init__(self, build: Build, inputs: int, block: Attending) -> None:
        super().__init__()
        self.num_heads = block.heads
        self.stride = block.stride
        self.has_skip = inputs == block.channels
        inner = block.heads * block.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "norm.weight": (inputs,),
            "attn.query.proj.weight": (inner, inputs, 1, 1),
            "attn.key.proj.weight": (block.head_dim, inputs, 1, 1),
            "attn.value.proj.weight": (block.head_dim, inputs, 1, 1),
            "attn.output.proj.weight": (block.channels, inner, 1, 1),
            "layer_scale.gamma": (block.channels,),
        }
        if block.stride > 1:
            for name in ("key", "value"):
                shapes[f"attn.{name}.down_conv.weight"] = (inputs, 1, 3, 3)
                shapes[f"attn.{name}.norm.weight"] = (inputs,)
        self.given = Parameters(build, shapes)

    def forward(self, features: Tensor) -> Tensor:
        given = self.given
        plain = normalized(features, given["norm.weight"])
        query = convolve(plain, given["attn.query.proj.weight"])
        heads = query.unflatten(1, (self.num_heads, -1)).flatten(3).transpose(2, 3)
        shape = (-1, self.num_heads, -1, -1)
        key, value = (self.reduced(plain, name).expand(shape) for name in ("key", "value"))
        mixed = functional.scaled_dot_product_attention(heads, key, value)
        joined = mixed.transpose(2, 3).flatten(1, 2).unflatten(2, features.shape[2:])
        out = convolve(joined, given["attn.output.proj.weight"])
        out = out * given["layer_scale.gamma"][:, None, None]
        return out + features if self.has_skip else out

    def reduced(self, plain: Tensor, name: str) -> Tensor:
        """Return the keys or values: [1, channels, height, width] → [1, 1, places, head_dim]."""
        given = self.given
        if self.stride > 1:
            weight = given[f"attn.{name}.down_conv.weight"]
            down = convolve(plain, weight, stride=self.stride, groups=len(weight))
            plain = normalized(down, given[f"attn.{name}.norm.weight"])
        rows = convolve(plain, given[f"attn.{name}.proj.weight"])
        return rows.flatten(2).transpose(1, 2)[:, None]
