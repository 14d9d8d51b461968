"""The geometries of random lives, and every layout that their layers can have."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from kvpack.model.geometry import Geometry, LayerGeometry
from kvpack.model.layout import LayerLayout, ProducerLayout
from tests import synthetic


@dataclass(frozen=True)
class Setting:
    """A geometry, the context, and the ring of its indexers (0: flat)."""

    geometry: Geometry
    max_context: int = 64
    index_rows: int = 8
    biggest_batch: int = 20


SETTINGS = {
    "every kind": Setting(
        Geometry(
            (
                synthetic.full(),
                synthetic.sliding(8),
                synthetic.latent(pool=4),
                synthetic.recurrent(),
                synthetic.shared(0),
                synthetic.sliding(6, sink=2),
            )
        )
    ),
    "token axes": Setting(
        Geometry(
            (synthetic.full(1, 4), synthetic.sliding(8), synthetic.latent(pool=3), synthetic.sliding(5, 1, 4, sink=3))
        ),
        index_rows=10,
    ),
    "rings": Setting(Geometry((synthetic.sliding(8), synthetic.sliding(3, 1, 4)))),
    "flat indexers": Setting(Geometry((synthetic.latent(pool=1), synthetic.latent(pool=4))), index_rows=0),
    "a draft beside": Setting(
        Geometry((synthetic.full(), synthetic.sliding(8)), draft_layers=(synthetic.full(1, 4), synthetic.sliding(4))),
        max_context=48,
    ),
    "long": Setting(Geometry((synthetic.sliding(8, 1, 2), synthetic.full(1, 2))), 9000, biggest_batch=1500),
}


def layout_choices(setting: Setting) -> st.SearchStrategy[ProducerLayout]:
    """Any law that each layer can have, at any capacity that it allows, in both orders."""
    context = setting.max_context

    def of(layer: LayerGeometry) -> st.SearchStrategy[LayerLayout]:
        kind, window, sink = layer.kind, layer.window or 0, layer.sink or 0
        order = st.sampled_from(["NHD", "HND"])
        growing = [
            st.builds(LayerLayout, st.just("linear"), st.just(context), order),
            st.builds(LayerLayout, st.just("paged"), st.just(context), order, st.just(4)),
        ]
        if kind in ("full", "latent"):
            return st.one_of(growing)
        if kind != "sliding":
            return st.just(LayerLayout("none", 0))
        room = st.integers(0, 5)
        if sink:
            pinned = st.builds(lambda more, o: LayerLayout("pinned", sink + window + more, o), room, order)
            return st.one_of(pinned, *growing)
        return st.one_of(
            st.builds(lambda more, o: LayerLayout("modulo", window + more, o), room, order),
            st.builds(lambda more, o: LayerLayout("chronological", window - 1 + more, o), room, order),
            st.builds(LayerLayout, st.just("rebase"), st.just(0), order),
            *growing,
        )

    return st.builds(
        ProducerLayout,
        st.tuples(*map(of, setting.geometry.layers)),
        st.tuples(*map(of, setting.geometry.draft_layers)),
    )
