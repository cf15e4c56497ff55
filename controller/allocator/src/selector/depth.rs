//! Limits the levels of a tree while it is parsed.

use super::compile_error::CompileError;
use super::tree::children;
use cel::common::ast::{Expr, IdedExpr};

/// The most levels of a tree. cel-go's parser accepts 250 levels of each kind.
const MOST_LEVELS: usize = 300;

/// Creates a node above its parts.
///
/// # Errors
/// [`CompileError::TooDeep`] if the tree has too many levels.
pub(super) fn node(expr: Expr) -> Result<IdedExpr, CompileError> {
    let mut node = IdedExpr { id: 0, expr };
    let below = children(&node).into_iter().map(|child| child.id).max();
    node.id = below.map_or(0, |below| below + 1);
    if node.id > MOST_LEVELS as u64 {
        return Err(CompileError::TooDeep { most: MOST_LEVELS });
    }
    Ok(node)
}
