//! `/etc/ld.so.cache` of glibc, format `glibc-ld.so.cache1.1`: reading it, and writing it with further
//! entries in front.
//!
//! The cache is the image's, so nothing in it is believed: every offset is checked, names have the length of
//! paths, and there are bounds for entries and bytes. A cache that is not understood is left as it is.
//!
//! Layout (glibc's `sysdeps/generic/dl-cache.h`): a header of 48 bytes, entries of 24, strings, extensions.
//! glibc before 2.32 puts a table of the old format `ld.so-1.7.0` before it; its readers take the new one
//! alone as well.

use std::cmp::Ordering;
use std::collections::HashMap;

/// The largest cache, in bytes.
pub(crate) const LARGEST: u64 = 8 << 20;
/// The most entries of a cache.
const MOST_ENTRIES: usize = 1 << 16;
/// The longest name or path, in bytes: as long as a path may be.
const LONGEST: usize = 4096;

const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const HEADER: usize = 48;
const ENTRY: usize = 24;
const OLD_HEADER: usize = 16;
const OLD_ENTRY: usize = 12;
/// `cache_extension_magic`
const EXTENSION_MAGIC: u32 = 0xEAA4_2174;
/// `cache_extension_tag_glibc_hwcaps`
const TAG_HWCAPS: u32 = 1;
const MOST_HWCAPS: usize = 256;

/// Byte order of the header's flags (`cache_file_new_flags_endian_little`); 0 is what older versions write.
const LITTLE_ENDIAN: u8 = 2;

/// `FLAG_ELF_LIBC6` and this architecture's flag.
#[cfg(target_arch = "x86_64")]
const FLAGS: i32 = 0x0303;
/// `FLAG_ELF_LIBC6` and this architecture's flag.
#[cfg(target_arch = "aarch64")]
const FLAGS: i32 = 0x0a03;
/// `FLAG_ELF_LIBC6` alone, which is i386's.
const FLAGS_32: i32 = 0x0003;

/// A library that the cache is to lead to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Library {
    /// The name by which programs ask for the library.
    pub(crate) name: String,
    /// The library's path in the container.
    pub(crate) path: String,
    /// True if the library is for 32-bit programs.
    pub(crate) compat32: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry<'a> {
    flags: i32,
    version: u32,
    hwcap: u64,
    name: &'a [u8],
    path: &'a [u8],
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Cache<'a> {
    entries: Vec<Entry<'a>>,
    /// Names of directories below `glibc-hwcaps`, which entries refer to by number.
    hwcaps: Vec<&'a [u8]>,
}

/// Returns a cache with these libraries before those of the image's cache. Returns `None` if the image's
/// cache is not understood, or if the new one would be too large.
pub(crate) fn with(image: Option<&[u8]>, libraries: &[Library]) -> Option<Vec<u8>> {
    let mut cache = match image {
        Some(image) => read(image)?,
        None => Cache::default(),
    };
    let ours: Vec<Entry<'_>> = libraries
        .iter()
        .map(|library| Entry {
            flags: if library.compat32 { FLAGS_32 } else { FLAGS },
            version: 0,
            hwcap: 0,
            name: library.name.as_bytes(),
            path: library.path.as_bytes(),
        })
        .collect();
    cache.entries.retain(|entry| !ours.contains(entry));
    // Of equal entries the first counts, and the sort keeps their order.
    cache.entries.splice(0..0, ours);
    cache.entries.sort_by(|a, b| compare(b.name, a.name).then(b.flags.cmp(&a.flags)));
    write(&cache)
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn string(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let rest = bytes.get(at..)?;
    let rest = rest.get(..rest.len().min(LONGEST))?;
    rest.get(..rest.iter().position(|byte| *byte == 0)?)
}

fn read(whole: &[u8]) -> Option<Cache<'_>> {
    if whole.len() as u64 > LARGEST {
        return None;
    }
    let file = if whole.starts_with(OLD_MAGIC) {
        let old = usize::try_from(number(whole, 12)?).ok()?;
        whole.get(OLD_HEADER.checked_add(old.checked_mul(OLD_ENTRY)?)?.next_multiple_of(8)..)?
    } else {
        whole
    };
    if !file.starts_with(MAGIC) || !matches!(file.get(28)?, 0 | &LITTLE_ENDIAN) {
        return None;
    }
    let count = usize::try_from(number(file, 20)?).ok().filter(|count| *count <= MOST_ENTRIES)?;
    let entries = (0..count).map(|index| {
        let at = HEADER + index * ENTRY;
        let text = |at| string(file, usize::try_from(number(file, at)?).ok()?);
        let low = number(file, at + 16)?;
        let high = number(file, at + 20)?;
        Some(Entry {
            flags: number(file, at)?.cast_signed(),
            name: text(at + 4)?,
            path: text(at + 8)?,
            version: number(file, at + 12)?,
            hwcap: u64::from(high) << 32 | u64::from(low),
        })
    });
    let entries = entries.collect::<Option<_>>()?;
    let extension = usize::try_from(number(file, 32)?).ok()?;
    let hwcaps = if extension == 0 { Vec::new() } else { hwcaps(whole, file, extension)? };
    Some(Cache { entries, hwcaps })
}

/// Reads the names of directories below `glibc-hwcaps`. Extensions are found from the beginning of the file,
/// strings from that of the new table.
fn hwcaps<'a>(whole: &[u8], file: &'a [u8], extension: usize) -> Option<Vec<&'a [u8]>> {
    if number(whole, extension)? != EXTENSION_MAGIC {
        return None;
    }
    let sections = usize::try_from(number(whole, extension.checked_add(4)?)?).ok()?;
    for index in 0..sections.min(MOST_HWCAPS) {
        let section = extension.checked_add(8 + index * 16)?;
        if number(whole, section)? != TAG_HWCAPS {
            continue;
        }
        let offset = usize::try_from(number(whole, section + 8)?).ok()?;
        let size = usize::try_from(number(whole, section + 12)?).ok()?;
        let count = Some(size / 4).filter(|count| *count <= MOST_HWCAPS)?;
        let names = (0..count).map(|index| {
            let at = number(whole, offset.checked_add(index * 4)?)?;
            string(file, usize::try_from(at).ok()?)
        });
        return names.collect();
    }
    Some(Vec::new())
}

/// Strings of the file, each once, with its offset.
struct Strings<'a> {
    start: usize,
    bytes: Vec<u8>,
    known: HashMap<&'a [u8], u32>,
}

impl<'a> Strings<'a> {
    fn add(&mut self, text: &'a [u8]) -> Option<u32> {
        if let Some(at) = self.known.get(text) {
            return Some(*at);
        }
        let at = u32::try_from(self.start + self.bytes.len()).ok()?;
        self.bytes.extend_from_slice(text);
        self.bytes.push(0);
        self.known.insert(text, at);
        (self.bytes.len() as u64 <= LARGEST).then_some(at)
    }
}

fn write(cache: &Cache<'_>) -> Option<Vec<u8>> {
    let start = HEADER + cache.entries.len() * ENTRY;
    let mut strings = Strings { start, bytes: Vec::new(), known: HashMap::new() };
    let mut entries = Vec::new();
    for entry in &cache.entries {
        entries.extend(entry.flags.to_le_bytes());
        entries.extend(strings.add(entry.name)?.to_le_bytes());
        entries.extend(strings.add(entry.path)?.to_le_bytes());
        entries.extend(entry.version.to_le_bytes());
        entries.extend(entry.hwcap.to_le_bytes());
    }
    let hwcaps = cache.hwcaps.iter().map(|name| strings.add(name)).collect::<Option<Vec<u32>>>()?;
    let end = start + strings.bytes.len();
    let extension = if hwcaps.is_empty() { 0 } else { end.next_multiple_of(4) };
    let number = |value: usize| u32::try_from(value).ok().map(u32::to_le_bytes);
    let mut file = MAGIC.to_vec();
    file.extend(number(cache.entries.len())?);
    file.extend(number(strings.bytes.len())?);
    file.extend([LITTLE_ENDIAN, 0, 0, 0]);
    file.extend(number(extension)?);
    file.resize(HEADER, 0);
    file.extend(entries);
    file.extend(strings.bytes);
    if extension != 0 {
        file.resize(extension, 0);
        for value in [EXTENSION_MAGIC, 1, TAG_HWCAPS, 0] {
            file.extend(value.to_le_bytes());
        }
        file.extend(number(extension + 8 + 16)?);
        file.extend(number(hwcaps.len() * 4)?);
        file.extend(hwcaps.iter().flat_map(|at| at.to_le_bytes()));
    }
    Some(file)
}

/// Returns the order of two names in a cache, in which the loader searches by halves: as text, but runs of
/// digits as numbers (`_dl_cache_libcmp`).
fn compare(a: &[u8], b: &[u8]) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        match (a.first(), b.first()) {
            (None, None) => return Ordering::Equal,
            (None, Some(y)) => return 0.cmp(&y.cast_signed()),
            (Some(x), Some(y)) if x.is_ascii_digit() && y.is_ascii_digit() => {
                let ((m, rest_a), (n, rest_b)) = (digits(a), digits(b));
                if m != n {
                    return m.cmp(&n);
                }
                (a, b) = (rest_a, rest_b);
            }
            (Some(x), _) if x.is_ascii_digit() => return Ordering::Greater,
            (Some(_), Some(y)) if y.is_ascii_digit() => return Ordering::Less,
            (Some(x), Some(y)) if x == y => (a, b) = (a.get(1..).unwrap_or(b""), b.get(1..).unwrap_or(b"")),
            // Bytes are compared as the signed numbers that `char` is on x86.
            (Some(x), y) => return x.cast_signed().cmp(&y.map_or(0, |y| y.cast_signed())),
        }
    }
}

/// Returns a run of digits as the number that the loader makes of it, an `int` that wraps, and the text
/// behind the run.
fn digits(text: &[u8]) -> (i32, &[u8]) {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (run, rest) = text.split_at_checked(end).unwrap_or((text, b""));
    let value = run
        .iter()
        .fold(0_i32, |value, byte| value.wrapping_mul(10).wrapping_add(i32::from(*byte) - i32::from(b'0')));
    (value, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_the_same_from_both_sides_whatever_the_bytes() {
        let names: [&[u8]; 8] = [b"", b"x", b"x\x80", b"x\x7f", b"x0", b"x01", b"x1", b"\xff"];
        for a in names {
            for b in names {
                assert_eq!(compare(a, b), compare(b, a).reverse(), "{a:?} {b:?}");
                for c in names {
                    let through = compare(a, b).is_le() && compare(b, c).is_le();
                    assert!(!through || compare(a, c).is_le(), "{a:?} {b:?} {c:?}");
                }
            }
        }
    }

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(name, path)| ((*name).to_owned(), (*path).to_owned())).collect()
    }

    fn libraries(list: &[(&str, &str)]) -> Vec<Library> {
        let library = |(name, path)| Library { name, path, compat32: false };
        pairs(list).into_iter().map(library).collect()
    }

    /// Names with paths of a cache.
    fn shown(file: &[u8]) -> Vec<(String, String)> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        read(file).unwrap().entries.iter().map(|entry| (text(entry.name), text(entry.path))).collect()
    }

    #[test]
    fn ours_come_before_equal_names_of_the_image() {
        let image = with(
            None,
            &libraries(&[("libcuda.so.1", "/stubs/libcuda.so.1"), ("libc.so.6", "/lib/libc.so.6")]),
        );
        let both =
            with(image.as_deref(), &libraries(&[("libcuda.so.1", "/usr/lib64/libcuda.so.1")])).unwrap();
        let want = [
            ("libcuda.so.1", "/usr/lib64/libcuda.so.1"),
            ("libcuda.so.1", "/stubs/libcuda.so.1"),
            ("libc.so.6", "/lib/libc.so.6"),
        ];
        assert_eq!(shown(&both), pairs(&want));
        // Again changes nothing.
        assert_eq!(
            with(Some(&both), &libraries(&[("libcuda.so.1", "/usr/lib64/libcuda.so.1")])).unwrap(),
            both
        );
    }

    #[test]
    fn libraries_for_32_bit_programs_lie_beside_those_of_the_same_names() {
        let of = |path: &str, compat32| Library { name: "libcuda.so.1".into(), path: path.into(), compat32 };
        let file = with(None, &[of("/32", true), of("/64", false)]).unwrap();
        let entries = read(&file).unwrap().entries;
        let flags: Vec<(i32, &[u8])> = entries.iter().map(|entry| (entry.flags, entry.path)).collect();
        assert_eq!(flags, [(FLAGS, b"/64".as_slice()), (FLAGS_32, b"/32")]);
    }

    #[test]
    fn numbers_in_names_are_compared_as_numbers() {
        for (less, more) in [
            ("libx.so.2", "libx.so.10"),
            ("liba.so", "libb.so"),
            ("libc.so", "libc1.so"),
            ("libx.so.1", "libx.so.1.0"),
        ] {
            assert_eq!(compare(less.as_bytes(), more.as_bytes()), Ordering::Less, "{less} {more}");
            assert_eq!(compare(more.as_bytes(), less.as_bytes()), Ordering::Greater, "{less} {more}");
        }
        assert_eq!(compare(b"libx.so.01", b"libx.so.1"), Ordering::Equal);
    }

    #[test]
    fn directories_for_better_processors_keep_their_numbers() {
        let entry = |hwcap| Entry { flags: FLAGS, version: 0, hwcap, name: b"libx.so.1", path: b"/x" };
        let cache =
            Cache { entries: vec![entry(1 << 62), entry(0)], hwcaps: vec![b"x86-64-v3", b"x86-64-v2"] };
        let file = write(&cache).unwrap();
        let more = with(Some(&file), &libraries(&[("liby.so.1", "/y")])).unwrap();
        let read = read(&more).unwrap();
        assert_eq!(read.hwcaps, cache.hwcaps);
        assert_eq!(read.entries.iter().map(|entry| entry.hwcap).collect::<Vec<_>>(), [0, 1 << 62, 0]);
    }

    #[test]
    fn the_old_table_before_the_new_one_is_passed_over() {
        let new = with(None, &libraries(&[("liba.so.1", "/a")])).unwrap();
        let mut old = b"ld.so-1.7.0\0".to_vec();
        old.extend(1_u32.to_le_bytes());
        old.extend([0; 12]);
        old.resize(32, 0);
        old.extend(&new);
        assert_eq!(shown(&old), pairs(&[("liba.so.1", "/a")]));
    }

    #[test]
    fn no_damage_is_more_than_not_understood() {
        let file = with(None, &libraries(&[("liba.so.1", "/a"), ("libb.so.1", "/b")])).unwrap();
        for at in 0..file.len() {
            assert!(with(Some(&file[..at]), &[]).is_none() || at > HEADER + 2 * ENTRY, "{at}");
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = file.clone();
                damaged[at] = value;
                let _ = with(Some(&damaged), &libraries(&[("libc.so.1", "/c")]));
            }
        }
        let mut many = file;
        many[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(with(Some(&many), &[]), None);
    }
}
