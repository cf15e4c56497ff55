//! Reads the loader that a program needs. Pure: it does no I/O.

/// The program header type of the loader's path.
const PT_INTERP: u32 = 3;

/// Returns the path of the loader that a 64-bit little-endian ELF file asks for. Returns `None` if it asks
/// for none, or is not such a file.
pub(super) fn interpreter(file: &[u8]) -> Option<String> {
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table = usize::try_from(u64::from_le_bytes(bytes(file, 32)?)).ok()?;
    let size = usize::from(u16::from_le_bytes(bytes(file, 54)?));
    let count = usize::from(u16::from_le_bytes(bytes(file, 56)?));
    let mut headers = (0..count).filter_map(|index| index.checked_mul(size)?.checked_add(table));
    let header = headers.find(|at| bytes(file, *at).map(u32::from_le_bytes) == Some(PT_INTERP))?;
    let field = |offset: usize| {
        let value = u64::from_le_bytes(bytes(file, header.checked_add(offset)?)?);
        usize::try_from(value).ok()
    };
    let (start, length) = (field(8)?, field(32)?);
    let text = file.get(start..start.checked_add(length)?)?;
    let path = std::str::from_utf8(text.strip_suffix(b"\0")?).ok()?;
    path.starts_with('/').then(|| path.to_owned())
}

fn bytes<const N: usize>(file: &[u8], at: usize) -> Option<[u8; N]> {
    file.get(at..at.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_names_its_loader_and_other_files_none() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        let loader = interpreter(&own).unwrap();
        assert!(std::path::Path::new(&loader).is_file(), "{loader}");
        assert_eq!(interpreter(b"#!/bin/sh\n"), None);
    }

    #[test]
    fn a_file_that_is_cut_off_or_damaged_names_none() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        for length in 0..600 {
            let _ = interpreter(&own[..length]);
        }
        for at in 0..600 {
            let mut damaged = own[..4096].to_vec();
            damaged[at] = 0xff;
            let _ = interpreter(&damaged);
        }
    }
}
