"""Who belongs to a pool, and under which name: engines that join, leave and come again."""

from __future__ import annotations

from pools import play_all, pool_of
from virtual_time import run
from worlds import FragileEngine, Watcher


def test_whoever_comes_to_a_place_bears_its_name_and_which_of_its_engines_it_is():
    async def scenario():
        asked = []

        async def open_another(place, name):
            asked.append((place, name))
            if len(asked) == 1:
                raise OSError("the device is busy")
            return FragileEngine()

        watcher, engines = Watcher(), [FragileEngine() for _ in range(3)]
        engines[1].fault = "die"
        pool = pool_of(*engines, watcher=watcher, open_another=open_another)
        await play_all(pool, watcher)
        assert asked == [(1, "engine-1.2"), (1, "engine-1.2")]  # one that did not come leaves no gap
        assert set(pool.engines) == {"engine-0", "engine-2", "engine-1.2"}
        assert watcher.engine_events[-1] == ("joined", "engine-1.2", "engine-1")
        assert [each.spec.name for each in pool.last_batch.engines] == ["engine-0", "engine-1", "engine-1.2", "engine-2"]

    run(scenario)
