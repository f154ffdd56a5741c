"""`mtpbuild bench`: how fast is each nextn, does MTP pay, and is it what its parts predict."""
