"""Two ends of a command: it works, or it refuses."""


def works(result: tuple[int, str, str]) -> str:
    status, out, err = result
    assert (status, err) == (0, "")
    return out


def refused(result: tuple[int, str, str], *parts: str) -> None:
    """Nothing was printed; the errors contain these texts and are not traceback."""
    status, out, err = result
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    for part in parts:
        assert part in err
