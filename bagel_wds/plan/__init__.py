"""What a run would look like before it is started: `bagel-wds plan`.

`load` reads the settings, `run` puts the figures together out of `shares` (how epochs are divided), `lengths` (tokens of
samples, judged by an index) and `footprint` (state, memory, requests); `advice` says what may hurt, `text` prints it all.
"""
