//! Reading the files of a share, and what `/proc` says about this process.

use crate::log::Text;
use crate::path::Path;
use crate::sys::{self, File};
use aliquot_quota::grant::{GRANT_SIZE, Grant};
use aliquot_quota::region::{self, Region};
use aliquot_quota::{QUOTA_FILE_SIZE, QuotaFile, REGION_FILE_SIZE};

pub(super) fn read_quota(path: &Path) -> Result<QuotaFile, Text<400>> {
    let file = File::read_only(path.as_c())
        .map_err(|errno| Text::of(format_args!("quota {path} cannot be opened (error {errno})")))?;
    let mut bytes = [0; QUOTA_FILE_SIZE + 1];
    let read = file
        .read_at(&mut bytes, 0)
        .map_err(|errno| Text::of(format_args!("quota {path} cannot be read (error {errno})")))?;
    QuotaFile::decode(bytes.get(..read).unwrap_or_default())
        .map_err(|error| Text::of(format_args!("quota {path} is not valid: {error}")))
}

pub(super) fn read_grant(path: &Path) -> Option<Grant> {
    let file = File::read_only(path.as_c()).ok()?;
    let mut bytes = [0; GRANT_SIZE + 1];
    let read = file.read_at(&mut bytes, 0).ok()?;
    Grant::decode(bytes.get(..read)?)
}

pub(super) fn open_region(path: &Path) -> Result<File, Text<400>> {
    let file = File::read_write(path.as_c())
        .map_err(|errno| Text::of(format_args!("region {path} cannot be opened (error {errno})")))?;
    let mut head = [0; region::INITIAL_HEADER_SIZE];
    let size = file.size().unwrap_or_default();
    let read = file.read_at(&mut head, 0).unwrap_or_default();
    region::check(size, head.get(..read).unwrap_or_default())
        .map_err(|error| Text::of(format_args!("region {path} is not valid: {error}")))?;
    Ok(file)
}

pub(super) fn map_region(file: &File, path: &Path) -> Result<*mut Region, Text<400>> {
    let mapped = file
        .map_shared(REGION_FILE_SIZE)
        .map_err(|errno| Text::of(format_args!("region {path} cannot be mapped (error {errno})")))?;
    sys::keep_from_children(mapped, REGION_FILE_SIZE);
    Ok(mapped.cast())
}

/// Returns the start time of this process in clock ticks since boot; 0 if `/proc` does not tell.
pub(super) fn start_time() -> u64 {
    let Ok(file) = File::read_only(c"/proc/self/stat") else { return 0 };
    let mut bytes = [0; 512];
    let read = file.read_at(&mut bytes, 0).unwrap_or_default();
    let text = bytes.get(..read).unwrap_or_default();
    // The command's name may hold anything; fields are counted behind its closing bracket.
    let Some(end) = text.iter().rposition(|b| *b == b')') else { return 0 };
    let fields = text.get(end + 1..).unwrap_or_default();
    fields
        .split(|b| *b == b' ')
        .filter(|field| !field.is_empty())
        .nth(19)
        .and_then(crate::env::parse_number)
        .unwrap_or_default()
}

/// Returns the inode of this process's pid namespace; 0 if `/proc` does not tell.
pub(crate) fn pid_namespace() -> u64 {
    let mut bytes = [0; 64];
    let target = sys::link_target(c"/proc/self/ns/pid", &mut bytes).unwrap_or_default();
    target
        .strip_prefix(b"pid:[")
        .and_then(|rest| rest.strip_suffix(b"]"))
        .and_then(crate::env::parse_number)
        .unwrap_or_default()
}
