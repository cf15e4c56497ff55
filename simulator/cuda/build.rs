//! Turns `symbols/symbols.csv` into the resolver's table and into exports for every symbol that nothing under
//! `src/api` implements: a real driver exports all of them, so this one does too.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    println!("cargo:rerun-if-changed=symbols/symbols.csv");
    println!("cargo:rerun-if-changed=src/api");

    // The name that programs are linked against, and: our own references to our own symbols never leave the library,
    // even where a preloaded one exports the same names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // There are threads and an exit handler: the library stays where it is until the process ends.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");

    let modelled = modelled(&root.join("src/api"))?;
    let table = fs::read_to_string(root.join("symbols/symbols.csv"))?;
    fs::write(out.join("symbols.rs"), generate(&table, &modelled)?)
}

/// Names in `fn cuSomething(` and `fn cuSomething | cuSomething_ptsz(` of the sources.
fn modelled(folder: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let text = fs::read_to_string(entry?.path())?;
        for piece in text.split("fn ").skip(1) {
            let head = piece.split('(').next().unwrap_or_default();
            for name in head.split('|').map(str::trim) {
                if name.starts_with("cu") && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
                    names.insert(name.to_owned());
                }
            }
        }
    }
    Ok(names)
}

fn generate(table: &str, modelled: &BTreeSet<String>) -> io::Result<String> {
    let mut rows = String::new();
    let mut stubs = String::new();
    let mut externs = String::new();
    let mut aliases = String::new();
    let mut unmodelled = String::new();
    let mut known = BTreeSet::new();
    for (number, line) in table.lines().skip(1).enumerate() {
        let columns: Vec<&str> = line.split(',').collect();
        let [name, since, flavour, elf, ..] = columns[..] else {
            return Err(io::Error::other(format!("symbols.csv line {}: {line}", number + 2)));
        };
        known.insert(elf.to_owned());
        let flavour = if flavour == "legacy" { "Legacy" } else { "PerThread" };
        let _ = writeln!(
            rows,
            "Symbol {{ name: \"{name}\", since: {since}, flavour: Flavour::{flavour}, export: \
             Entry({elf}), alias: Entry(aliquot_sim_alias_{number}) }},"
        );
        let _ = writeln!(externs, "fn {elf}(); fn aliquot_sim_alias_{number}();");
        // `@PLT` only says how the reference may be resolved: the linker binds it inside the library.
        let jump = if env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("aarch64") { "b" } else { "jmp" };
        let plt = if jump == "jmp" { "@PLT" } else { "" };
        let _ = writeln!(
            aliases,
            ".hidden aliquot_sim_alias_{number}\n.globl aliquot_sim_alias_{number}\n\
             .type aliquot_sim_alias_{number}, %function\naliquot_sim_alias_{number}: {jump} {elf}{plt}\n.balign 16"
        );
        if !modelled.contains(elf) {
            let _ = writeln!(
                stubs,
                "#[unsafe(no_mangle)] extern \"C\" fn {elf}() -> i32 {{ crate::entry::unmodelled(\"{elf}\") }}"
            );
            let _ = writeln!(unmodelled, "\"{elf}\",");
        }
    }
    if let Some(stray) = modelled.difference(&known).next() {
        return Err(io::Error::other(format!("{stray} is implemented but not in symbols.csv")));
    }
    Ok(format!(
        "/// Every symbol, by base name and version.\npub(crate) static SYMBOLS: &[Symbol] = &[\n{rows}];\n\
         unsafe extern \"C\" {{\n{externs}}}\n\
         core::arch::global_asm!(r#\".text\n{aliases}\"#);\n\
         mod stubs {{\n{stubs}}}\n"
    ))
}
