//! Masks: sets of places on a GPU, one bit for each.

/// Returns the places of a mask.
pub(super) fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let place = mask.trailing_zeros();
        mask &= mask.checked_sub(1)?;
        usize::try_from(place).ok()
    })
}
