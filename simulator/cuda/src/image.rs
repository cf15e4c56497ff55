//! Images of code: what functions they hold and what each costs. A function is a duration with a name.
//!
//! An image that begins with `aliquot-sim-module` is a list, line by line, of what is in it:
//!
//! ```text
//! aliquot-sim-module 1
//! image 5000000                  # bytes of device memory that the code takes
//! kernel axpy us=500 share=25    # runs 500 µs on a quarter of the multiprocessors
//! kernel grow local=65536        # needs 64 KiB of local memory per thread
//! kernel wait param=us           # runs as long as its first parameter says
//! kernel scan us=10 block_ns=40  # and 40 ns for each block of its grid
//! kernel crash fault=700         # ends its context with that error
//! global table 4096
//! ```
//!
//! Any other image (PTX, cubin, fat binary) is taken unread and has every function that it is asked for. Functions that
//! are not listed get their figures from their name: `spin_us_500`, `spin_us_500_share_25`, `spin_param_us`,
//! `fault_700`; or last as long as `kernel_us` says.

use std::collections::BTreeMap;

use crate::codes::{Code, Cu};
use crate::plan::WHOLE;

/// First word of the text form.
const HEADER: &str = "aliquot-sim-module";
/// First word of a fat binary.
const FAT_BINARY: u32 = 0xba55_ed50;
/// Bytes of a file or text that are looked at.
const LONGEST_TEXT: usize = 1 << 20;

/// What a function costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) cost_ns: Option<u64>,
    /// Nanoseconds in a unit of the first parameter, where that is the duration.
    pub(crate) param_unit_ns: Option<u64>,
    pub(crate) block_ns: u64,
    /// Thousandths of the GPU; `None` follows the grid.
    pub(crate) share: Option<u32>,
    pub(crate) local: u64,
    pub(crate) fault: Option<Code>,
}

/// What is in an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) bytes: u64,
    /// Only listed functions are there.
    closed: bool,
    kernels: BTreeMap<String, Figures>,
    /// Bytes of each global variable.
    pub(crate) globals: BTreeMap<String, u64>,
}

impl Figures {
    /// What a name that is not listed says.
    fn of_name(name: &str) -> Self {
        let mut figures = Self::default();
        let words: Vec<&str> = name.split('_').collect();
        for (index, word) in words.iter().enumerate() {
            let next = words.get(index + 1).copied().unwrap_or("");
            match (*word, next.parse::<u64>().ok(), unit_ns(next)) {
                ("share", Some(percent), _) => figures.set("share", &percent.to_string()),
                ("fault", Some(code), _) => figures.set("fault", &code.to_string()),
                ("local", Some(bytes), _) => figures.set("local", &bytes.to_string()),
                ("param", _, Some(unit)) => {
                    figures.param_unit_ns = Some(unit);
                    true
                }
                (unit, Some(_), _) if unit_ns(unit).is_some() => figures.set(unit, next),
                _ => true,
            };
        }
        figures
    }

    /// One `key=value`; whether it made sense.
    fn set(&mut self, key: &str, value: &str) -> bool {
        let number = value.parse::<u64>().ok();
        match (key, number) {
            ("share", Some(percent)) => {
                let thousandths = u32::try_from(percent.saturating_mul(10)).unwrap_or(WHOLE);
                self.share = Some(thousandths.clamp(1, WHOLE));
            }
            ("local", Some(bytes)) => self.local = bytes,
            ("block_ns", Some(ns)) => self.block_ns = ns,
            ("fault", Some(code)) => self.fault = i32::try_from(code).ok().filter(|c| *c != 0).map(Code),
            ("param", _) => match unit_ns(value) {
                Some(unit) => self.param_unit_ns = Some(unit),
                None => return false,
            },
            (unit, Some(amount)) => match unit_ns(unit) {
                Some(ns) => self.cost_ns = Some(amount.saturating_mul(ns)),
                None => return false,
            },
            _ => return false,
        }
        true
    }
}

fn unit_ns(unit: &str) -> Option<u64> {
    match unit {
        "ns" => Some(1),
        "us" => Some(1_000),
        "ms" => Some(1_000_000),
        _ => None,
    }
}

impl Image {
    /// The functions that are listed.
    pub(crate) fn listed(&self) -> impl Iterator<Item = &String> {
        self.kernels.keys()
    }

    /// What a function costs, as listed or as its name says; `None` where the image does not have it.
    pub(crate) fn figures_of(&self, name: &str) -> Option<Figures> {
        match self.kernels.get(name) {
            Some(figures) => Some(*figures),
            None if self.closed => None,
            None => Some(Figures::of_name(name)),
        }
    }

    /// Reads the text form.
    pub(crate) fn parse(text: &str) -> Cu<Self> {
        let mut image = Self { closed: true, ..Self::default() };
        let mut lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
        if lines.next().and_then(|first| first.split_whitespace().next()) != Some(HEADER) {
            return Err(Code::INVALID_IMAGE);
        }
        for line in lines.filter(|line| !line.is_empty()) {
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some("image"), Some(bytes)) => {
                    image.bytes = bytes.parse().map_err(|_| Code::INVALID_IMAGE)?
                }
                (Some("global"), Some(name)) => {
                    let bytes = words.next().and_then(|b| b.parse().ok()).ok_or(Code::INVALID_IMAGE)?;
                    image.globals.insert(name.to_owned(), bytes);
                }
                (Some("kernel"), Some(name)) => {
                    let mut figures = Figures::of_name(name);
                    for setting in words {
                        let (key, value) = setting.split_once('=').ok_or(Code::INVALID_IMAGE)?;
                        if !figures.set(key, value) {
                            return Err(Code::INVALID_IMAGE);
                        }
                    }
                    image.kernels.insert(name.to_owned(), figures);
                }
                _ => return Err(Code::INVALID_IMAGE),
            }
        }
        Ok(image)
    }

    /// What a file holds.
    pub(crate) fn from_file(path: &str) -> Cu<Self> {
        let content = std::fs::read(path).map_err(|_| Code::FILE_NOT_FOUND)?;
        if content.starts_with(HEADER.as_bytes()) {
            return Self::parse(&String::from_utf8(content).map_err(|_| Code::INVALID_IMAGE)?);
        }
        Ok(Self { bytes: content.len() as u64, ..Self::default() })
    }

    /// What lies at an address: only as much is read as the first bytes vouch for.
    pub(crate) fn from_memory(address: u64) -> Cu<Self> {
        if address == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let byte = |index: usize| {
            // SAFETY: the caller vouches for an image there. Text is read up to its end, and of other images only the
            // header that all of them have.
            unsafe { ((address as *const u8).add(index)).read() }
        };
        let is_text = HEADER.bytes().enumerate().all(|(i, expected)| byte(i) == expected);
        if is_text {
            let text: Vec<u8> = (0..LONGEST_TEXT).map(byte).take_while(|b| *b != 0).collect();
            return Self::parse(&String::from_utf8(text).map_err(|_| Code::INVALID_IMAGE)?);
        }
        let word = |at: usize, length: usize| {
            (0..length).rev().fold(0_u64, |sum, i| sum << 8 | u64::from(byte(at + i)))
        };
        let first = (0..4).rev().try_fold(0_u32, |sum, i| match byte(i) {
            0 => None,
            b => Some(sum << 8 | u32::from(b)),
        });
        let bytes = if first == Some(FAT_BINARY) { word(8, 8) } else { 0 };
        Ok(Self { bytes, ..Self::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_and_closes_the_image() {
        let text = "aliquot-sim-module 1\nimage 5000 # code\nkernel a us=500 share=25\n\nkernel spin_ms_2 local=64\n\
                    kernel p param=us\nkernel x fault=700\nglobal g 4096\n";
        let image = Image::parse(text).unwrap();
        assert_eq!(image.bytes, 5000);
        assert_eq!((image.kernels["a"].cost_ns, image.kernels["a"].share), (Some(500_000), Some(250)));
        assert_eq!(
            (image.kernels["spin_ms_2"].cost_ns, image.kernels["spin_ms_2"].local),
            (Some(2_000_000), 64)
        );
        assert_eq!(image.kernels["p"].param_unit_ns, Some(1000));
        assert_eq!(image.kernels["x"].fault, Some(Code::ILLEGAL_ADDRESS));
        assert_eq!(image.globals["g"], 4096);
        assert!(image.closed);
    }

    #[test]
    fn bad_lines_are_refused() {
        for line in ["kernel", "kernel a us", "kernel a weeks=2", "image big", "global g", "nonsense x"] {
            assert_eq!(
                Image::parse(&format!("aliquot-sim-module 1\n{line}")),
                Err(Code::INVALID_IMAGE),
                "{line}"
            );
        }
        assert_eq!(Image::parse("ELF"), Err(Code::INVALID_IMAGE));
    }

    #[test]
    fn names_carry_figures() {
        assert_eq!(Figures::of_name("spin_us_500_share_25").cost_ns, Some(500_000));
        assert_eq!(Figures::of_name("spin_us_500_share_25").share, Some(250));
        assert_eq!(Figures::of_name("fault_719").fault, Some(Code::LAUNCH_FAILED));
        assert_eq!(Figures::of_name("spin_param_us").param_unit_ns, Some(1000));
        assert_eq!(Figures::of_name("ampere_sgemm_128x64_nn"), Figures::default());
    }

    #[test]
    fn text_in_memory_is_read_to_its_end_and_other_images_are_not() {
        let text = c"aliquot-sim-module 1\nkernel k";
        assert!(Image::from_memory(text.as_ptr() as u64).unwrap().kernels.contains_key("k"));
        let mut fat = [0_u8; 16];
        fat[..4].copy_from_slice(&FAT_BINARY.to_le_bytes());
        fat[8..].copy_from_slice(&123_456_u64.to_le_bytes());
        assert_eq!(Image::from_memory(fat.as_ptr() as u64).unwrap().bytes, 123_456);
        assert_eq!(Image::from_memory(c"\x7fELF".as_ptr() as u64).unwrap(), Image::default());
    }
}
