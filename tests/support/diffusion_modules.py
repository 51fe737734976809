"""A small U-Net in plain torch, in the shape of diffusers' class, for counting FLOPs."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    batch, length, width = query.shape
    query, key, value = (x.reshape(batch, -1, heads, width // heads).transpose(1, 2) for x in (query, key, value))
    weights = (query @ key.transpose(-1, -2)).softmax(-1)
    return (weights @ value).transpose(1, 2).reshape(batch, length, width)


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, time_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels_in), nn.GroupNorm(4, channels_out)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.time = nn.Linear(time_width, channels_out)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1) if channels_in != channels_out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class TransformerBlock(nn.Module):
    def __init__(self, channels: int, heads: int, text_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm0, self.norms = nn.GroupNorm(4, channels), nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.proj_in, self.proj_out = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.qkv = nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.out = nn.Linear(channels, channels)
        self.cross_q = nn.Linear(channels, channels, bias=False)
        self.cross_k, self.cross_v = (nn.Linear(text_width, channels, bias=False) for _ in range(2))
        self.cross_out = nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, 8 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        hidden = self.proj_in(self.norm0(x).flatten(2).transpose(1, 2))
        normed = self.norms[0](hidden)
        hidden = hidden + self.out(attend(*(linear(normed) for linear in self.qkv), self.heads))
        query = self.cross_q(self.norms[1](hidden))
        hidden = hidden + self.cross_out(attend(query, self.cross_k(text), self.cross_v(text), self.heads))
        one, other = self.up(self.norms[2](hidden)).chunk(2, dim=-1)
        hidden = self.proj_out(hidden + self.down(one * F.gelu(other)))
        return x + hidden.transpose(1, 2).reshape(batch, channels, height, width)


class UNet(nn.Module):
    """As `UNet2DConditionModel`: `crosses` says which levels have transformer blocks; the middle always has one."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        widths, heads = config["block_out_channels"], config["attention_head_dim"]
        per_level, text_width = config["layers_per_block"], config["cross_attention_dim"]
        crosses = ["CrossAttn" in kind for kind in config["down_block_types"]]
        time_width, last = 4 * widths[0], len(widths) - 1
        self.time = nn.Sequential(nn.Linear(widths[0], time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.conv_in = nn.Conv2d(config["in_channels"], widths[0], 3, padding=1)

        def pair(channels_in: int, level: int, attends: bool) -> nn.ModuleList:
            block = ResidualBlock(channels_in, widths[level], time_width)
            rest = [TransformerBlock(widths[level], heads[level], text_width)] if attends else []
            return nn.ModuleList([block, *rest])

        self.down, self.downsample, skips, channels = nn.ModuleList(), nn.ModuleList(), [widths[0]], widths[0]
        for level, width in enumerate(widths):
            pairs = nn.ModuleList()
            for _ in range(per_level):
                pairs.append(pair(channels, level, crosses[level]))
                channels = width
                skips.append(width)
            self.down.append(pairs)
            if level < last:
                self.downsample.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList([*pair(channels, last, True), ResidualBlock(channels, channels, time_width)])
        self.up, self.upsample = nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(len(widths))):
            pairs = nn.ModuleList()
            for _ in range(per_level + 1):
                pairs.append(pair(channels + skips.pop(), level, crosses[level]))
                channels = widths[level]
            self.up.append(pairs)
            if level:
                self.upsample.append(nn.Conv2d(channels, channels, 3, padding=1))
        self.norm_out, self.conv_out = (
            nn.GroupNorm(4, channels),
            nn.Conv2d(channels, config["out_channels"], 3, padding=1),
        )

    def forward(self, latent: Tensor, time: Tensor, text: Tensor) -> Tensor:
        time, hidden = self.time(time), self.conv_in(latent)
        skips = [hidden]
        for level, pairs in enumerate(self.down):
            for blocks in pairs:
                for block in blocks:
                    hidden = block(hidden, time, text)
                skips.append(hidden)
            if level < len(self.downsample):
                hidden = self.downsample[level](hidden)
                skips.append(hidden)
        for block in self.middle:
            hidden = block(hidden, time, text)
        for level, pairs in enumerate(self.up):
            for blocks in pairs:
                hidden = torch.cat([hidden, skips.pop()], dim=1)
                for block in blocks:
                    hidden = block(hidden, time, text)
            if level < len(self.upsample):
                hidden = self.upsample[level](F.interpolate(hidden, scale_factor=2.0))
        return self.conv_out(F.silu(self.norm_out(hidden)))
