// The product in fp64 on Hopper, with its section of the PTX ISA.
#pragma once

namespace ptx {

// "mma", m16n8k8 in f64: d += A B. Lane 4·r + c of a warp, r < 8 and c < 4, holds
//   A [16, 8]  a[0], a[1] column c of rows r and r + 8; a[2], a[3] column c + 4
//   B [8, 8]   b[0] column r, row c; b[1] row c + 4
//   D [16, 8]  d[0], d[1] row r, columns 2c and 2c + 1; d[2], d[3] row r + 8
__device__ inline void mma(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}

}  // namespace ptx
