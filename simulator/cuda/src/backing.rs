//! Content of device memory: real for what is written, nothing for what is not.
//!
//! Allocations are usually far larger than this machine's memory and mostly never written, so content exists page
//! by page: a page that was filled with one repeated word costs nothing, a page with other content costs host
//! memory, up to a bound for the whole process. Above the bound writes are accepted and lost; [`lost_writes`] says
//! how many. Memory that can be handed to other processes keeps its content in a file that they share.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

const PAGE: u64 = 64 << 10;

static HELD: AtomicUsize = AtomicUsize::new(0);
static LOST: AtomicU64 = AtomicU64::new(0);

/// Writes that found no room.
pub(crate) fn lost_writes() -> u64 {
    LOST.load(Relaxed)
}

enum Page {
    /// This word over and over.
    Word(u32),
    Bytes(Box<[u8]>),
}

enum Content {
    Pages(BTreeMap<u64, Page>),
    /// Content starts at this offset of the file.
    File(File, u64),
}

/// Content of one allocation.
pub(crate) struct Backing {
    content: Mutex<Content>,
    bound: usize,
}

impl Drop for Page {
    fn drop(&mut self) {
        if let Self::Bytes(bytes) = self {
            HELD.fetch_sub(bytes.len(), Relaxed);
        }
    }
}

impl Backing {
    /// Zeroes. `bound` is the host memory that all content of the process may take.
    pub(crate) fn new(bound: usize) -> Self {
        Self { content: Mutex::new(Content::Pages(BTreeMap::new())), bound }
    }

    /// Content in a file, from that offset on.
    pub(crate) fn in_file(file: File, offset: u64, bound: usize) -> Self {
        Self { content: Mutex::new(Content::File(file, offset)), bound }
    }

    fn with<R>(&self, work: impl FnOnce(&mut Content) -> R) -> R {
        work(&mut self.content.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Copies content out.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) {
        self.with(|content| match content {
            Content::File(file, start) => {
                into.fill(0);
                let mut done = 0;
                while let Some(rest) = into.get_mut(done..).filter(|r| !r.is_empty()) {
                    match file.read_at(rest, *start + offset + done as u64) {
                        Ok(n) if n > 0 => done += n,
                        _ => break,
                    }
                }
            }
            Content::Pages(pages) => {
                for (number, within, part) in split(offset, into.len()) {
                    let Some(into) = into.get_mut(part) else { continue };
                    match pages.get(&number) {
                        None => into.fill(0),
                        Some(Page::Word(word)) => fill_words(into, within, *word),
                        Some(Page::Bytes(bytes)) => {
                            if let Some(from) = bytes.get(within..within + into.len()) {
                                into.copy_from_slice(from);
                            }
                        }
                    }
                }
            }
        });
    }

    /// Copies content in.
    pub(crate) fn write(&self, offset: u64, from: &[u8]) {
        self.with(|content| match content {
            Content::File(file, start) => {
                let room = u64::try_from(self.bound).unwrap_or(u64::MAX);
                if offset > room || file.write_all_at(from, *start + offset).is_err() {
                    LOST.fetch_add(1, Relaxed);
                }
            }
            Content::Pages(pages) => {
                for (number, within, part) in split(offset, from.len()) {
                    let Some(from) = from.get(part) else { continue };
                    match bytes_of(pages, number, self.bound)
                        .and_then(|b| b.get_mut(within..within + from.len()))
                    {
                        Some(into) => into.copy_from_slice(from),
                        None => {
                            LOST.fetch_add(1, Relaxed);
                        }
                    }
                }
            }
        });
    }

    /// Fills with a repeated word; `offset` is a multiple of the word's period (1, 2 or 4).
    pub(crate) fn fill(&self, offset: u64, length: u64, word: u32) {
        let whole = |within: usize, part: &std::ops::Range<u64>| within == 0 && part.end - part.start == PAGE;
        let mut at = offset;
        let end = offset.saturating_add(length);
        while at < end {
            let number = at / PAGE;
            let stop = end.min((number + 1) * PAGE);
            let within = usize::try_from(at % PAGE).unwrap_or(0);
            let replaced = whole(within, &(at..stop))
                && self.with(|content| match content {
                    Content::Pages(pages) => {
                        pages.insert(number, Page::Word(word));
                        true
                    }
                    Content::File(..) => false,
                });
            if !replaced {
                let mut piece = vec![0; usize::try_from(stop - at).unwrap_or(0)];
                fill_words(&mut piece, within, word);
                self.write(at, &piece);
            }
            at = stop;
        }
    }

    /// Copies from another (or the same) allocation, page by page, fills as fills.
    pub(crate) fn copy_from(&self, to: u64, other: &Self, from: u64, length: u64) {
        let mut done = 0;
        while done < length {
            let step = (length - done).min(PAGE - (from + done) % PAGE);
            let number = (from + done) / PAGE;
            let plain = other.with(|content| match content {
                Content::Pages(pages) => match pages.get(&number) {
                    None => Some(0),
                    Some(Page::Word(word)) => Some(*word),
                    Some(Page::Bytes(_)) => None,
                },
                Content::File(..) => None,
            });
            match plain {
                Some(word) if (to + done) % 4 == (from + done) % 4 => self.fill(to + done, step, word),
                _ => {
                    let mut piece = vec![0; usize::try_from(step).unwrap_or(0)];
                    other.read(from + done, &mut piece);
                    self.write(to + done, &piece);
                }
            }
            done += step;
        }
    }

    /// Moves the content to a file that other processes may open, from `start` on.
    pub(crate) fn move_to_file(&self, file: File, start: u64) {
        self.with(|content| {
            if let Content::Pages(pages) = content {
                for (number, page) in pages.iter() {
                    let mut piece = vec![0; usize::try_from(PAGE).unwrap_or(0)];
                    match page {
                        Page::Word(0) => continue,
                        Page::Word(word) => fill_words(&mut piece, 0, *word),
                        Page::Bytes(bytes) => piece.copy_from_slice(bytes),
                    }
                    if file.write_all_at(&piece, start + number * PAGE).is_err() {
                        LOST.fetch_add(1, Relaxed);
                    }
                }
                *content = Content::File(file, start);
            }
        });
    }
}

/// The page as bytes, made so if there is room.
fn bytes_of(pages: &mut BTreeMap<u64, Page>, number: u64, bound: usize) -> Option<&mut [u8]> {
    let page = pages.entry(number).or_insert(Page::Word(0));
    if let Page::Word(word) = page {
        let size = usize::try_from(PAGE).unwrap_or(0);
        if HELD.fetch_add(size, Relaxed) + size > bound {
            HELD.fetch_sub(size, Relaxed);
            return None;
        }
        let mut bytes = vec![0; size].into_boxed_slice();
        fill_words(&mut bytes, 0, *word);
        *page = Page::Bytes(bytes);
    }
    match page {
        Page::Bytes(bytes) => Some(bytes),
        Page::Word(_) => None,
    }
}

/// Writes the word's bytes as they stand at that offset of memory filled with it.
fn fill_words(into: &mut [u8], within: usize, word: u32) {
    let bytes = word.to_le_bytes();
    for (byte, value) in into.iter_mut().zip(bytes.iter().cycle().skip(within % 4)) {
        *byte = *value;
    }
}

/// Page number, offset in the page and part of the buffer, for every page that the range touches.
fn split(offset: u64, length: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0_usize;
    std::iter::from_fn(move || {
        if done >= length {
            return None;
        }
        let at = offset + done as u64;
        let within = usize::try_from(at % PAGE).ok()?;
        let step = (length - done).min(usize::try_from(PAGE).ok()? - within);
        let part = done..done + step;
        done += step;
        Some((at / PAGE, within, part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_the_rest_is_zero() {
        let memory = Backing::new(usize::MAX);
        memory.write(PAGE - 2, &[1, 2, 3, 4]);
        let mut out = [9; 8];
        memory.read(PAGE - 4, &mut out);
        assert_eq!(out, [0, 0, 1, 2, 3, 4, 0, 0]);
    }

    #[test]
    fn a_terabyte_can_be_filled_and_copied_for_nothing() {
        let (a, b) = (Backing::new(0), Backing::new(0));
        a.fill(0, 1 << 32, 0x0403_0201);
        b.copy_from(PAGE, &a, 0, 1 << 30);
        let mut out = [0; 6];
        b.read(PAGE + (1 << 29) - 2, &mut out);
        assert_eq!(out, [3, 4, 1, 2, 3, 4]);
    }

    #[test]
    fn writes_above_the_bound_are_lost_and_counted() {
        let memory = Backing::new(0);
        let before = lost_writes();
        memory.write(0, &[1]);
        let mut out = [7];
        memory.read(0, &mut out);
        assert_eq!(out, [0]);
        assert!(lost_writes() > before);
    }
}
