"""How decoder layers are spread over pipeline stages where nobody says otherwise: by the trainer, and in every plan for it."""


def pipeline_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Decoder layers of each (virtual) stage: evenly, and where that leaves some over, one more on middle stages first.

    The first and the last stage also hold the embedding and the output layer.
    """
    counts = [layers // stages] * stages
    for number in [*range(1, stages - 1), 0, stages - 1][: layers % stages]:
        counts[number] += 1
    return tuple(counts)
