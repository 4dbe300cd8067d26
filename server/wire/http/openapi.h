#ifndef RAPT_SERVER_WIRE_HTTP_OPENAPI_H_
#define RAPT_SERVER_WIRE_HTTP_OPENAPI_H_

#include "server/wire/http/router.h"

namespace rapt::http {

// Serves proto/openapi.json, which describes all paths, to anybody.
void AddOpenApi(Router& router);

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_OPENAPI_H_
