//! Address space of the device: addresses that are nobody else's and fault when the host touches them.

use std::ptr;

/// Reserves addresses without memory behind them. `low` asks for the first 2 GiB, for the 32-bit entry points.
pub(crate) fn reserve(bytes: u64, align: u64, low: bool) -> Option<u64> {
    let align = align.max(4096);
    let padded = usize::try_from(bytes.checked_add(align)?).ok()?;
    let base = map(padded, libc::PROT_NONE, low)?;
    let start = base.next_multiple_of(align);
    // What lies before and behind the aligned part goes back.
    unmap(base, start - base);
    let end = start + bytes.next_multiple_of(4096);
    unmap(end, (base + padded as u64).saturating_sub(end));
    Some(start)
}

/// Reserves exactly that range, where it is free.
pub(crate) fn reserve_at(address: u64, bytes: u64) -> Option<u64> {
    let length = usize::try_from(bytes).ok()?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: NOREPLACE never touches an existing mapping.
    let got = unsafe { libc::mmap(address as *mut libc::c_void, length, libc::PROT_NONE, flags, -1, 0) };
    if got == libc::MAP_FAILED {
        return None;
    }
    if got as u64 != address {
        unmap(got as u64, bytes);
        return None;
    }
    Some(address)
}

/// Memory that host and device both see; the kernel fills it in when it is touched.
pub(crate) fn host_memory(bytes: u64) -> Option<u64> {
    map(usize::try_from(bytes.max(1)).ok()?, libc::PROT_READ | libc::PROT_WRITE, false)
}

/// Gives a range of [`reserve`], [`reserve_at`] or [`host_memory`] back.
pub(crate) fn unmap(address: u64, bytes: u64) {
    let length = usize::try_from(bytes.next_multiple_of(4096)).unwrap_or(0);
    if length > 0 {
        // SAFETY: callers pass ranges that they got from this module and that nothing refers to any more.
        unsafe { libc::munmap(address as *mut libc::c_void, length) };
    }
}

fn map(length: usize, protection: libc::c_int, low: bool) -> Option<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    #[cfg(target_arch = "x86_64")]
    let flags = if low { flags | libc::MAP_32BIT } else { flags };
    // SAFETY: a new anonymous mapping at an address of the kernel's choice.
    let got = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, -1, 0) };
    let usable = got != libc::MAP_FAILED && (!low || (got as u64) < (1 << 31));
    usable.then_some(got as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_are_aligned_and_apart() {
        let align = 2 << 20;
        let a = reserve(100 << 30, align, false).unwrap();
        let b = reserve(1, align, false).unwrap();
        assert_eq!((a % align, b % align), (0, 0));
        assert!(b < a || b >= a + (100 << 30));
        unmap(a, 100 << 30);
        assert_eq!(reserve_at(a, 4096), Some(a));
        assert_eq!(reserve_at(a, 4096), None);
        unmap(a, 4096);
        unmap(b, 1);
    }

    #[test]
    fn low_addresses_fit_into_32_bits() {
        let low = reserve(1 << 20, 4096, true).unwrap();
        assert!(low + (1 << 20) <= 1 << 32);
        unmap(low, 1 << 20);
    }
}
