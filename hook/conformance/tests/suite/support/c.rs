//! C programs that the tests compile.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles `tests/c/<name>.c`, or a text, with the machine's compiler.
pub(crate) fn compile(source: &Path, to: &Path, arguments: &[&str]) {
    assert!(try_compile("cc", source, to, arguments), "a C compiler, which rustc links with as well");
}

/// The same with a compiler that may be missing; tells whether there is a program.
pub(crate) fn try_compile(compiler: &str, source: &Path, to: &Path, arguments: &[&str]) -> bool {
    let status = Command::new(compiler).arg("-w").arg("-o").arg(to).arg(source).args(arguments).status();
    match status {
        Ok(status) => status.success(),
        Err(error) => {
            eprintln!("skipped: {compiler} cannot be run: {error}");
            false
        }
    }
}

/// One of the tests' own programs.
pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name).with_extension("c")
}
