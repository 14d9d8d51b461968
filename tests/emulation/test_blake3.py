"""``blake3.cu`` against the blake3 package. Its kernels have barriers: each CUDA thread is an OS thread."""

from __future__ import annotations

from ctypes import c_uint32, c_uint64

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from kvpack_kernels import abi

from tests.emulation.build import address, emulated, examples, memory
from tests.emulation.planes import Bytes


def digests(messages: list[Bytes], threads: int, root_threads: int) -> list[str]:
    """Both launches for all messages; the words past the nodes and the digests must stay."""
    table, tiles = abi.hash_table([(address(message), message.size) for message in messages], threads)
    rng = np.random.default_rng(tiles)
    nodes, out = memory(32 * tiles, rng), memory(32 * len(messages), rng)
    jobs = c_uint64(address(table))
    library = emulated("blake3")
    arguments = jobs, c_uint32(len(table)), c_uint64(address(nodes))
    library.launch("kvpack_hash_tiles", tiles, threads, *arguments, order="threaded")
    arguments = jobs, c_uint64(address(nodes)), c_uint64(address(out))
    library.launch("kvpack_hash_roots", len(messages), root_threads, *arguments, order="threaded")
    return [digest.tobytes().hex() for digest in out.reshape(-1, 32)]


def check(lengths: list[int], threads: int, root_threads: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    messages = [memory(length, rng) for length in lengths]
    expected = [blake3(message.tobytes()).hexdigest() for message in messages]
    assert digests(messages, threads, root_threads) == expected


def message_lengths() -> st.SearchStrategy[int]:
    """Lengths around the ends of blocks of 64, chunks of 1,024 and trees of any number of chunks."""
    near = st.builds(
        lambda chunks, blocks, more: max(0, chunks * 1024 + blocks * 64 + more),
        st.integers(0, 70),
        st.integers(0, 15),
        st.integers(-5, 5),
    )
    return st.one_of(near, st.integers(0, 70 * 1024), st.integers(0, 200))


@given(
    st.lists(message_lengths(), min_size=1, max_size=5),
    st.sampled_from((8, 16, 32)),
    st.sampled_from((8, 16)),
    st.integers(0, 1 << 32),
)
@examples(200)
def test_any_mix_of_messages(lengths: list[int], threads: int, root_threads: int, seed: int) -> None:
    check(lengths, threads, root_threads, seed)


def test_every_length_up_to_two_blocks_and_around_a_chunk() -> None:
    check([*range(130), *range(1020, 1030), *range(2046, 2051)], 8, 8, 1)


@pytest.mark.parametrize("chunks", range(1, 41))
def test_trees_of_every_shape(chunks: int) -> None:
    """One more than a power of two, one less, and all between, over several blocks of threads."""
    check([chunks * 1024, chunks * 1024 - 1, (chunks - 1) * 1024 + 1], 8, 8, chunks)


def test_a_tile_as_packs_have_it() -> None:
    """1 MiB and a little, with the block that a GPU is given."""
    check([(1 << 20) + 77, 1 << 20], abi.THREADS, 8, 2)


def test_more_nodes_than_the_second_launch_has_threads() -> None:
    check([8 * 1024 * 100 + 3], 8, 8, 3)
