//! The vocabulary of Aliquot: GPUs, profiles, placements, shares, device names and the published layout. No I/O.
