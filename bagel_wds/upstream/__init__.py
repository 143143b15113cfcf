"""Upstream's classes under upstream's names: readers of raw files that give ready samples, one dict each.

They are for code that was written against upstream: a class of one's own that fills `_add_text` and `_add_image` in its
`parse_row` and is put into `DATASET_REGISTRY` runs as it is. As there, they read whole row groups, decode every picture at
once, and draw from the process-wide `random` and `numpy.random`, which they never seed. A run on the three built-in groups
uses them for the order of rows alone; the rest is planned first and decoded last, as from shards.

| room | what lives there |
| --- | --- |
| `draws` | draws from the process-wide generators, and these lent a state of one's own for one call |
| `parquet_paths` | which parquet files there are |
| `distributed` | paths over ranks and workers; pass after pass |
| `samples` | upstream's sample dicts: made piece by piece, and taken as plans |
| `interleave`, `t2i`, `vlm`, `frame_sampler` | the classes |
| `registry` | which class reads a group, and what it is built with |
| `groups` | which groups of a run are read by classes |
| `sources` | the plans of a group that such a class reads, for a run |
| `sequence` | upstream's sequence status, by our layout |
"""
