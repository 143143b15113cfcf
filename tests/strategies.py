"""Hypothesis strategies that several test files share."""

from __future__ import annotations

from hypothesis import strategies as st

CONTROL_STRINGS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>")
"""What must never come out of data as a control token."""


def words(max_size: int = 12) -> st.SearchStrategy[str]:
    """Short texts of any characters that UTF-8 can hold."""
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=max_size)


def texts_with_control_strings() -> st.SearchStrategy[str]:
    """Texts in which control strings, and pieces of them, stand anywhere: doubled, nested, at both ends."""
    pieces = st.sampled_from([piece for token in CONTROL_STRINGS for piece in (token, token[:5], token[1:])])
    return st.lists(st.one_of(pieces, st.sampled_from(CONTROL_STRINGS), words(6)), max_size=8).map("".join)


def addresses() -> st.SearchStrategy[tuple[int | str, ...]]:
    """Addresses of draws: few letters and digits, so that two of them often look alike when run together."""
    part = st.one_of(st.integers(-20, 200), st.text("01:si-", max_size=3))
    return st.lists(part, max_size=4).map(tuple)


def member_keys() -> st.SearchStrategy[str]:
    """Keys of samples as tars have them: with folders, long, in any script; no dot."""
    letters = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="./")
    part = st.text(letters, min_size=1, max_size=12).filter(lambda text: not text.startswith("__"))
    return st.one_of(
        part,
        st.lists(part, min_size=2, max_size=3).map("/".join),
        st.integers(90, 240).map(lambda length: "k" * length),
        st.integers(3, 9).map(lambda count: "/".join(["folder-of-some-length"] * count) + "/k"),
    )


def damaged(originals: list[bytes]) -> st.SearchStrategy[bytes]:
    """One of these files with some bytes changed, taken out or put in, and perhaps cut."""

    def damage(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(st.sampled_from(originals)))
        for _ in range(draw(st.integers(1, 4))):
            place = draw(st.integers(0, len(data)))
            match draw(st.sampled_from(["change", "take out", "put in", "cut"])):
                case "change":
                    data[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
                case "take out":
                    del data[place : place + draw(st.integers(1, 9))]
                case "put in":
                    data[place:place] = draw(st.binary(min_size=1, max_size=9))
                case _:
                    del data[max(place, 1) :]
        return bytes(data)

    return st.composite(damage)()
