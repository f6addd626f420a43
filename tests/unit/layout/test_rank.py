from tknp.layout.rank import Rank


def test_index_is_node_major_and_inverts() -> None:
    ranks = [Rank(n, t) for n in range(3) for t in range(4)]
    assert [r.index(4) for r in ranks] == list(range(12))
    assert [Rank.from_index(i, 4) for i in range(12)] == ranks
    assert sorted(ranks, reverse=True)[0] == Rank(2, 3)
    assert str(Rank(2, 3)) == "(2, 3)"
