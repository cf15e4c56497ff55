//! The way into every exported function: what is checked and injected before it runs, and after it the threads that its
//! work needs and the call log.

use std::fmt::Write as _;

use crate::codes::{Code, Cu};
use crate::driver::{self, Driver};
use crate::{log, worker};

/// What must be true before a function runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// Nothing: it works without a GPU.
    Nothing,
    /// The node must be there, but `cuInit` need not have been called.
    Node,
    /// `cuInit` has succeeded in this process.
    Init,
}

/// Runs the body of an exported function.
pub(crate) fn call(
    name: &'static str,
    need: Need,
    arguments: impl Fn(&mut String),
    body: impl FnOnce(&'static Driver) -> Cu,
) -> i32 {
    let driver = driver::get();
    let result = admit(driver, name, need).and_then(|()| {
        let result = body(driver);
        // A forked child has the table of its parent, but none of its threads, and gets none.
        if driver.needs_threads() && driver.check_process().is_ok() {
            worker::start(driver);
        }
        result
    });
    let code = result.map_or_else(|code| code.0, |()| 0);
    log::line(|| {
        let mut line = format!("{name}(");
        arguments(&mut line);
        let _ = write!(line, ") = {code}");
        line
    });
    code
}

/// What a function does that is exported and nothing more.
pub(crate) fn unmodelled(name: &'static str) -> i32 {
    call(name, Need::Nothing, |_| (), |_| Err(Code::NOT_SUPPORTED))
}

fn admit(driver: &'static Driver, name: &'static str, need: Need) -> Cu {
    spin(driver.config.call_ns);
    if let Some(code) = driver.node.as_ref().and_then(|node| node.enter(name)) {
        return Err(Code(code));
    }
    match need {
        Need::Nothing => Ok(()),
        Need::Node => driver.check_process(),
        Need::Init => driver.check_ready(),
    }
}

/// Host time that a call costs.
fn spin(ns: u64) {
    if ns > 0 {
        let end = aliquot_sim_node::now_ns() + ns;
        while aliquot_sim_node::now_ns() < end {
            std::hint::spin_loop();
        }
    }
}

/// Defines exported functions.
///
/// `api! { (driver, stream_flavour) ... }` names what bodies can use: the driver, and for a function with a per-thread
/// twin (`fn cuX | cuX_ptsz (...)`) which of the two was called. A body ends in a `Cu`.
macro_rules! api {
    (($driver:ident, $flavour:ident) $($need:ident fn $name:ident $(| $twin:ident)? ($($argument:tt)*) $body:tt)*) => {
        $(
            $crate::entry::api!(@one $need $name ($($argument)*) $driver $flavour Legacy $body);
            $crate::entry::api!(@twin $need ($($twin)?) ($($argument)*) $driver $flavour $body);
        )*
    };
    (@twin $need:ident () $arguments:tt $driver:ident $flavour:ident $body:tt) => {};
    (@twin $need:ident ($twin:ident) $arguments:tt $driver:ident $flavour:ident $body:tt) => {
        $crate::entry::api!(@one $need $twin $arguments $driver $flavour PerThread $body);
    };
    (@one $need:ident $name:ident ($($argument:ident : $type:ty),* $(,)?) $driver:ident $flavour:ident $value:ident
     $body:tt) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the driver's own names")]
        extern "C" fn $name($($argument: $type),*) -> i32 {
            let arguments = |_line: &mut String| {
                let mut _separator = "";
                $(
                    let _ = std::fmt::Write::write_fmt(
                        _line,
                        format_args!(concat!("{}", stringify!($argument), "={:?}"), _separator, $argument),
                    );
                    _separator = ", ";
                )*
            };
            #[allow(unused_variables, reason = "not every body asks")]
            let $flavour = $crate::resolver::Flavour::$value;
            $crate::entry::call(
                stringify!($name),
                $crate::entry::Need::$need,
                arguments,
                #[allow(unused_variables, reason = "not every body asks")]
                |$driver: &'static $crate::driver::Driver| $body,
            )
        }
    };
}
pub(crate) use api;
