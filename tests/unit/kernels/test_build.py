"""Choosing an instruction set, compiling once, and saying why there are no kernels."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tknp.errors import InvalidValue, Unavailable
from tknp.kernels import build as building
from tknp.kernels.build import build, find_compiler
from tknp.kernels.isa import AVX2, AVX512_BF16, Isa, best_isa, choose_isa

PLAIN = Isa("plain", frozenset(), ())


@pytest.fixture
def compiler() -> None:
    try:
        find_compiler()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def sources(tmp_path):
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    return directory


def test_the_fastest_instruction_set_is_chosen() -> None:
    both = AVX2.needs | AVX512_BF16.needs
    assert best_isa(both) is AVX512_BF16
    assert best_isa(AVX2.needs | {"avx512f"}) is AVX2
    assert best_isa(frozenset({"sse2"})) is None
    assert choose_isa("auto", both) is AVX512_BF16
    assert choose_isa("avx2", both) is AVX2


@pytest.mark.parametrize(
    ("setting", "features", "reason"),
    [
        ("off", AVX2.needs, "TKNP_KERNELS=off"),
        ("auto", frozenset({"sse2"}), "avx2"),
        ("avx512_bf16", AVX2.needs, "avx512_bf16"),
    ],
)
def test_the_reason_is_given(setting, features, reason) -> None:
    with pytest.raises(Unavailable, match=reason):
        choose_isa(setting, features)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"TKNP_KERNELS='fast'.*avx2"):
        choose_isa("fast", AVX2.needs)


def test_an_image_brings_them_without_a_compiler(monkeypatch, tmp_path, sources, compiler) -> None:
    monkeypatch.setattr(building, "ISAS", (PLAIN,))
    monkeypatch.setattr(building, "PREBUILT", tmp_path / "image")
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setattr(building, "chosen_isa", lambda: PLAIN)
    (made,) = building.prebuild(tmp_path / "image", sources)
    monkeypatch.setattr(building, "find_compiler", lambda: pytest.fail("a compiler is asked for"))
    assert building.prepare() == made
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    with pytest.raises(pytest.fail.Exception, match="a compiler"):
        building.prepare()


def test_no_compiler(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Unavailable, match=r"install g\+\+"):
        find_compiler()


@pytest.mark.usefixtures("compiler")
def test_processes_that_start_together_compile_once(tmp_path, sources, capfd) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(3) as pool:
        built = set(pool.map(lambda _: build(PLAIN, cache, sources), range(3)))
    assert capfd.readouterr().err.count("building CPU kernels") == 1
    (library,) = built
    assert build(PLAIN, cache, sources) == library
    assert sorted(path.name for path in library.parent.iterdir()) == ["kernels.so", "lock"]
    assert not capfd.readouterr().err


@pytest.mark.usefixtures("compiler")
def test_changed_sources_are_compiled_again(tmp_path, sources) -> None:
    first = build(PLAIN, tmp_path, sources)
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert build(PLAIN, tmp_path, sources) != first


@pytest.mark.usefixtures("compiler")
def test_what_the_compiler_says_is_the_reason(tmp_path, sources) -> None:
    (sources / "two.cpp").write_text("int two() { return nothing; }\n")
    with pytest.raises(Unavailable, match="nothing"):
        build(PLAIN, tmp_path, sources)
    assert not list(tmp_path.rglob("kernels.so"))


@pytest.mark.usefixtures("compiler")
def test_a_cache_that_cannot_be_written(tmp_path, sources) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="XDG_CACHE_HOME"):
        build(PLAIN, tmp_path / "file", sources)


def test_the_cache_follows_the_user(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert building.user_cache() == tmp_path / "tknp" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert building.user_cache() == tmp_path / ".cache" / "tknp" / "kernels"
