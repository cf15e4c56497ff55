//! The dynamic symbols of a library that is loaded, read from its file: what a program finds that goes past
//! the dynamic linker.

use crate::cuda::CudaError;

/// Symbols and where the library lies.
pub(crate) struct Table {
    file: Vec<u8>,
    base: usize,
}

/// Section type of dynamic symbols.
const DYNAMIC_SYMBOLS: u64 = 11;
/// Size of a symbol.
const SYMBOL: usize = 24;

impl Table {
    /// Of the library whose file name begins so.
    pub(crate) fn of_loaded(prefix: &str) -> Result<Self, CudaError> {
        let maps = std::fs::read_to_string("/proc/self/maps").map_err(|e| CudaError::Table(e.to_string()))?;
        let found = maps.lines().find_map(|line| {
            let path = line.get(line.find('/')?..)?;
            let is_it = path.rsplit('/').next()?.starts_with(prefix);
            let base = usize::from_str_radix(line.split('-').next()?, 16).ok()?;
            // The first mapping of a library is that of its beginning.
            is_it.then(|| (base, path.to_owned()))
        });
        let (base, path) = found.ok_or_else(|| CudaError::Table(format!("no {prefix} is loaded")))?;
        let file = std::fs::read(&path).map_err(|e| CudaError::Table(format!("{path}: {e}")))?;
        Ok(Self { file, base })
    }

    /// Address of a function.
    pub(crate) fn address(&self, name: &str) -> Result<usize, CudaError> {
        self.find(name).ok_or_else(|| CudaError::Table(format!("there is no {name}")))
    }

    fn find(&self, name: &str) -> Option<usize> {
        let (sections, count) = (self.number(40, 8)?, self.number(60, 2)?);
        let section = |index: u64| usize::try_from(sections + index * 64).ok();
        let of_type = |kind| (0..count).filter_map(section).find(|at| self.number(at + 4, 4) == Some(kind));
        let symbols = of_type(DYNAMIC_SYMBOLS)?;
        let names = section(self.number(symbols + 40, 4)?)?;
        let strings = usize::try_from(self.number(names + 24, 8)?).ok()?;
        let start = usize::try_from(self.number(symbols + 24, 8)?).ok()?;
        let size = usize::try_from(self.number(symbols + 32, 8)?).ok()?;
        (start..start + size).step_by(SYMBOL).find_map(|at| {
            let text = self.file.get(strings + usize::try_from(self.number(at, 4)?).ok()?..)?;
            let value = usize::try_from(self.number(at + 8, 8)?).ok().filter(|value| *value != 0)?;
            (text.strip_prefix(name.as_bytes())?.first() == Some(&0)).then_some(self.base + value)
        })
    }

    /// A number of so many bytes.
    fn number(&self, at: usize, bytes: usize) -> Option<u64> {
        let bytes = self.file.get(at..at + bytes)?;
        Some(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }
}
