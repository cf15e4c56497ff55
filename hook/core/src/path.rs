//! Paths of the limiter's own files.

use crate::log::Text;

/// A path of the limiter's own files, of bounded length.
pub(crate) type Path = Text<512>;
