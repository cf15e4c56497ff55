//! First fit in a range.

use std::collections::BTreeMap;

/// Free parts of a range of bytes.
#[derive(Clone, Debug)]
pub(crate) struct Extents {
    size: u64,
    free: BTreeMap<u64, u64>,
}

impl Extents {
    pub(crate) fn new(size: u64) -> Self {
        Self { size, free: BTreeMap::from([(0, size)]) }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Takes a part; the offset is a multiple of `align`, which divides the offsets of all former parts' ends.
    pub(crate) fn take(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let bytes = bytes.checked_next_multiple_of(align)?;
        let (&offset, &length) = self.free.iter().find(|(_, length)| **length >= bytes)?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        Some(offset)
    }

    /// Gives a part back, by the offset and size that it was taken with.
    pub(crate) fn give(&mut self, offset: u64, bytes: u64, align: u64) {
        let (mut start, mut end) = (offset, offset + bytes.next_multiple_of(align));
        if let Some((&before, &length)) = self.free.range(..start).next_back()
            && before + length == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(length) = self.free.remove(&end) {
            end += length;
        }
        self.free.insert(start, end - start);
    }

    pub(crate) fn is_unused(&self) -> bool {
        self.free.get(&0) == Some(&self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_merge_again() {
        let mut range = Extents::new(1024);
        let a = range.take(1, 512).unwrap();
        let b = range.take(512, 512).unwrap();
        assert_eq!((a, b), (0, 512));
        assert_eq!(range.take(1, 512), None);
        range.give(a, 1, 512);
        assert!(!range.is_unused());
        range.give(b, 512, 512);
        assert!(range.is_unused());
        assert_eq!(range.take(1024, 512), Some(0));
    }
}
