"""What a reload changes."""

import msgspec

from conf.reload import ReloadPlan, diff, restart_keys
from conf.schema import Admission, Band, Config, Endpoint, Log, Model, Router, RoutingProfile, Timeouts

A = Endpoint(id="a", model="m", url="http://a:1")
B = Endpoint(id="b", model="m", url="http://b:1")
BASE = Config(models=(Model(name="m"),), endpoints=(A, B))


def test_an_equal_configuration_changes_nothing() -> None:
    assert diff(BASE, msgspec.structs.replace(BASE)) == ReloadPlan((), ())


def test_a_nested_value_is_named_by_its_dotted_key() -> None:
    new = msgspec.structs.replace(BASE, router=Router(retries=5, timeouts=Timeouts(idle=1.0)))
    assert diff(BASE, new) == ReloadPlan(("router.retries", "router.timeouts.idle"), ())


def test_an_endpoint_is_named_by_its_id_wherever_it_stands() -> None:
    moved = msgspec.structs.replace(B, url="http://c:1")
    new = msgspec.structs.replace(BASE, endpoints=(moved,))
    assert diff(BASE, new).changed == ("endpoints[a]", "endpoints[b].url")


def test_a_new_model_and_a_new_profile_are_named() -> None:
    new = msgspec.structs.replace(
        BASE,
        models=(*BASE.models, Model(name="n")),
        router=Router(profiles={"chat": RoutingProfile(), "x": RoutingProfile()}),
    )
    assert diff(BASE, new).changed == ("models[n]", "router.profiles.x")


def test_deadlines_that_a_model_gains_are_named() -> None:
    new = msgspec.structs.replace(BASE, models=(Model(name="m", timeouts=Timeouts()),))
    assert diff(BASE, new).changed == ("models[m].timeouts",)


def test_the_order_of_endpoints_alone_is_a_change() -> None:
    assert diff(BASE, msgspec.structs.replace(BASE, endpoints=(B, A))).changed == ("endpoints",)


def test_listeners_and_processes_need_a_restart() -> None:
    new = msgspec.structs.replace(BASE, listen=":1", workers=4, log=Log(level="debug"), drain_timeout=1.0)
    plan = diff(BASE, new)
    assert plan.changed == ("drain_timeout", "listen", "log.level", "workers")
    assert plan.needs_restart == ("listen", "log.level", "workers")


def test_bands_need_a_restart_and_what_stands_beside_them_does_not() -> None:
    bands = (Band(name="gold", priority=1, saturation_ceiling=1.0), *Admission().bands[2:])
    new = msgspec.structs.replace(
        BASE, router=Router(admission=Admission(bands=bands, queue_ttl=5.0, default_band="gold"))
    )
    plan = diff(BASE, new)
    assert "router.admission.queue_ttl" in plan.changed
    assert plan.needs_restart
    assert all(key.startswith("router.admission.bands[") for key in plan.needs_restart)


def test_the_keys_that_need_a_restart_are_those_of_the_schema() -> None:
    assert restart_keys() == {
        "listen",
        "admin_listen",
        "workers",
        "state_dir",
        "instance",
        "max_connections",
        "log",
        "plain_proxy",
        "redis",
        "router.admission.bands",
    }
