//! What the limiter's two files are as ELF files. A wrong import here would end every program of a container
//! before its first instruction, so the gates are on the built files and not on the sources.

use crate::table;
use std::collections::BTreeSet;
use std::path::Path;

/// The parts of an ELF file that matter to the loader.
struct Elf {
    size: usize,
    machine: u16,
    needed: Vec<String>,
    /// (tag, value) of the dynamic section.
    dynamic: Vec<(u64, u64)>,
    /// Kinds of program headers.
    segments: Vec<u32>,
    symbols: Vec<Symbol>,
}

struct Symbol {
    name: String,
    defined: bool,
    is_weak: bool,
    version: Option<String>,
}

impl Elf {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(&bytes[..5], b"\x7fELF\x02", "{}: 64-bit ELF", path.display());
        let (u16_at, u32_at, u64_at) = (
            |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()),
            |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()),
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()),
        );
        let headers: Vec<(u32, u64, u64, u64)> = (0..usize::from(u16_at(56)))
            .map(|i| u64_at(32) as usize + i * usize::from(u16_at(54)))
            .map(|at| (u32_at(at), u64_at(at + 8), u64_at(at + 16), u64_at(at + 32)))
            .collect();
        let offset = |address: u64| {
            let (_, offset, start, _) = headers
                .iter()
                .find(|(kind, _, start, size)| *kind == 1 && (*start..start + size).contains(&address))
                .unwrap();
            (address - start + offset) as usize
        };
        let (_, at, _, size) = *headers.iter().find(|(kind, ..)| *kind == 2).expect("a dynamic section");
        let dynamic: Vec<(u64, u64)> = (0..size as usize / 16)
            .map(|i| (u64_at(at as usize + i * 16), u64_at(at as usize + i * 16 + 8)))
            .take_while(|(tag, _)| *tag != 0)
            .collect();
        let tag = |wanted: u64| dynamic.iter().find(|(tag, _)| *tag == wanted).map(|(_, value)| *value);
        let strings = offset(tag(5).unwrap());
        let text = |at: u64| {
            let at = strings + at as usize;
            let end = bytes[at..].iter().position(|b| *b == 0).unwrap();
            String::from_utf8(bytes[at..at + end].to_vec()).unwrap()
        };
        // Names of the versions that are needed, by index.
        let mut versions = std::collections::BTreeMap::new();
        if let (Some(need), Some(count)) = (tag(0x6fff_fffe), tag(0x6fff_ffff)) {
            let mut at = offset(need);
            for _ in 0..count {
                let mut aux = at + u32_at(at + 8) as usize;
                for _ in 0..u16_at(at + 2) {
                    versions.insert(u16_at(aux + 6), text(u64::from(u32_at(aux + 8))));
                    aux += u32_at(aux + 12) as usize;
                }
                at += u32_at(at + 12) as usize;
            }
        }
        // The string table follows the symbols; that bounds their number.
        let (table, version_table) = (offset(tag(6).unwrap()), tag(0x6fff_fff0).map(&offset));
        let end = version_table.filter(|at| *at > table && *at < strings).unwrap_or(strings);
        let end = tag(0x6fff_fef5).map(&offset).filter(|at| *at > table && *at < end).unwrap_or(end);
        let symbols = (1..(end - table) / 24)
            .map(|i| table + i * 24)
            .enumerate()
            .map(|(i, at)| Symbol {
                name: text(u64::from(u32_at(at))),
                defined: u16_at(at + 6) != 0,
                is_weak: bytes[at + 4] >> 4 == 2,
                version: version_table.and_then(|v| versions.get(&u16_at(v + (i + 1) * 2)).cloned()),
            })
            .filter(|symbol| !symbol.name.is_empty())
            .collect();
        let segments = headers.iter().map(|(kind, ..)| *kind).collect();
        let needed = dynamic.iter().filter(|(tag, _)| *tag == DT_NEEDED).map(|(_, at)| text(*at)).collect();
        Self { size: bytes.len(), machine: u16_at(18), needed, dynamic, segments, symbols }
    }

    fn has(&self, tag: u64) -> bool {
        self.dynamic.iter().any(|(found, _)| *found == tag)
    }

    fn exported(&self) -> BTreeSet<&str> {
        self.symbols.iter().filter(|symbol| symbol.defined).map(|symbol| symbol.name.as_str()).collect()
    }

    fn imported(&self) -> BTreeSet<&str> {
        self.symbols.iter().filter(|symbol| !symbol.defined).map(|symbol| symbol.name.as_str()).collect()
    }

    /// The newest glibc version that is needed, as (major, minor, patch).
    fn newest_glibc(&self) -> Vec<u32> {
        let number = |version: &str| -> Vec<u32> {
            version.strip_prefix("GLIBC_").unwrap().split('.').map(|part| part.parse().unwrap()).collect()
        };
        let strong = |symbol: &&Symbol| !symbol.defined && !symbol.is_weak;
        let versions = self.symbols.iter().filter(strong).map(|symbol| {
            symbol.version.as_deref().unwrap_or_else(|| panic!("{} has no version", symbol.name))
        });
        versions.map(number).max().unwrap()
    }
}

const PT_TLS: u32 = 7;
const DT_NEEDED: u64 = 1;
const DT_INIT: u64 = 12;
const DT_FINI: u64 = 13;
const DT_TEXTREL: u64 = 22;
const DT_BIND_NOW: u64 = 24;
const DT_INIT_ARRAY: u64 = 25;
const DT_FINI_ARRAY: u64 = 26;
const DT_FLAGS: u64 = 30;
const DF_SYMBOLIC: u64 = 2;
const DF_BIND_NOW: u64 = 8;
const DT_VERDEF: u64 = 0x6fff_fffc;

fn nothing_runs_and_nothing_is_thread_local(elf: &Elf) {
    for (name, tag) in [
        ("INIT", DT_INIT),
        ("FINI", DT_FINI),
        ("INIT_ARRAY", DT_INIT_ARRAY),
        ("FINI_ARRAY", DT_FINI_ARRAY),
        ("TEXTREL", DT_TEXTREL),
        ("VERDEF", DT_VERDEF),
    ] {
        assert!(!elf.has(tag), "{name}");
    }
    assert!(!elf.segments.contains(&PT_TLS), "TLS");
}

/// Stub and core as built for a machine, and the oldest glibc that it has.
struct Files {
    stub: Elf,
    core: Elf,
    oldest_glibc: Vec<u32>,
}

const EM_X86_64: u16 = 62;
const EM_AARCH64: u16 = 183;

/// The files for every machine that they can be built for here.
fn all() -> Vec<Files> {
    let read = |folder: &Path| {
        let read = |file| Elf::read(&folder.join(file));
        let (stub, core) = (read("libaliquot_preload.so"), read("libaliquot_core.so"));
        assert_eq!(stub.machine, core.machine);
        let oldest_glibc = match stub.machine {
            EM_X86_64 => vec![2, 2, 5],
            EM_AARCH64 => vec![2, 17],
            other => panic!("built for machine {other}"),
        };
        Files { stub, core, oldest_glibc }
    };
    let here = read(&crate::support::built().limiter);
    let arm = crate::support::arm::limiter().map(|folder| read(&folder));
    assert!(arm.iter().all(|files| files.stub.machine == EM_AARCH64));
    std::iter::once(here).chain(arm).collect()
}

#[test]
fn the_stub_can_be_loaded_into_anything() {
    for Files { stub, oldest_glibc, .. } in all() {
        assert!(stub.size <= 64 << 10, "{} bytes", stub.size);
        assert_eq!(stub.needed, ["libc.so.6"]);
        nothing_runs_and_nothing_is_thread_local(&stub);
        assert!(stub.newest_glibc() <= oldest_glibc, "{:?}", stub.newest_glibc());
        // Lazily bound: a missing symbol would matter only when it is called.
        assert!(!stub.has(DT_BIND_NOW));
        let flags = stub.dynamic.iter().find(|(tag, _)| *tag == DT_FLAGS).map_or(0, |(_, flags)| *flags);
        assert_eq!(flags & DF_BIND_NOW, 0);
        // Every exec would pay for a look-up of each export that is referred to.
        assert_eq!(flags & DF_SYMBOLIC, DF_SYMBOLIC);
    }
}

#[test]
fn the_stub_calls_nothing_that_a_program_may_replace_before_the_first_vendor_name() {
    for Files { stub, .. } in all() {
        // The functions are for names of the vendor's; the loader's record is only read.
        assert_eq!(stub.imported(), BTreeSet::from(["_r_debug", "dl_iterate_phdr"]));
        assert!(stub.symbols.iter().all(|symbol| symbol.is_weak == (symbol.name == "_r_debug")));
    }
}

#[test]
fn neither_file_imports_what_it_or_the_stub_exports() {
    for Files { stub, core, .. } in all() {
        for imported in [stub.imported(), core.imported()] {
            let both: Vec<_> = stub.exported().intersection(&imported).copied().collect();
            assert!(both.is_empty(), "{both:?}");
        }
    }
}

#[test]
fn the_stub_exports_the_hook_table_and_nothing_else() {
    let mut expected: BTreeSet<&str> = table::ROWS.iter().map(|row| row.symbol).collect();
    assert_eq!(expected.len(), table::COUNT, "no row is there twice");
    expected.extend(["dlsym", "dlvsym", "dlopen"]);
    for Files { stub, .. } in all() {
        assert_eq!(stub.exported(), expected);
    }
}

#[test]
fn the_core_can_be_loaded_beside_an_old_libc() {
    for Files { core, .. } in all() {
        assert_eq!(core.needed, ["libc.so.6"]);
        nothing_runs_and_nothing_is_thread_local(&core);
        assert!(core.newest_glibc() <= vec![2, 17], "{:?}", core.newest_glibc());
        assert_eq!(core.exported(), BTreeSet::from(["aliquot_core_start"]));
    }
}
