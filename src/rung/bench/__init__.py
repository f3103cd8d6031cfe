"""`rung bench`: measures what training stands on. `collectives` is the first of them."""
